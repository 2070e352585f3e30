"""Check the pickle of a checkpoint before `torch.load` acts on it.

`torch.load(weights_only=True)` calls only functions that execute no foreign code, but some of them take any amount of memory:
`bytearray(2**32)` is a few bytes long in a file, and so is a tensor of 10⁹ numbers. `check_pickles` reads the same pickle with
harmless functions in their place. It builds plain values and no tensors.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from types import NoneType
from typing import IO, Any, ClassVar, NamedTuple
from zipfile import ZipFile

import torch

from cifar_lit.errors import InvalidFileError

MAX_CONTAINERS = 500_000  # lists, dicts and tuples; a tensor has about eight
MAX_TUPLE_KEYS = 1000
MAX_KEY = 2**61  # larger integers can be chosen so that their hashes are equal
MAX_SIDES = 64  # dimensions of a tensor
MAX_TENSORS = 10_000  # views of one storage included
STORAGES = {  # bytes per number
    "ComplexDoubleStorage": 16, "ComplexFloatStorage": 8, "DoubleStorage": 8, "LongStorage": 8, "FloatStorage": 4,
    "IntStorage": 4, "HalfStorage": 2, "BFloat16Storage": 2, "ShortStorage": 2, "CharStorage": 1, "ByteStorage": 1,
    "BoolStorage": 1, "UntypedStorage": 1,
}  # fmt: skip
PLAIN = (  # opcodes of protocol 2 whose cost is that of their bytes
    pickle.PROTO, pickle.STOP, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2,
    pickle.LONG1, pickle.BINFLOAT, pickle.BINUNICODE, pickle.SHORT_BINSTRING, pickle.GLOBAL, pickle.REDUCE, pickle.BINPERSID,
    pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET, pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.APPEND,
    pickle.APPENDS,
)  # fmt: skip
# One byte in the file, about 64 in memory.
CONTAINERS = (pickle.MARK, pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
UNKNOWN_TENSOR = "it has a tensor of a kind that no training wrote"


class _Storage(NamedTuple):
    nbytes: int
    itemsize: int


class _Tensor:
    """A stand-in for a tensor whose storage holds all of its numbers."""


def check_pickles(path: Path, container: ZipFile | None) -> None:
    """Raise InvalidFileError if a file of torch.save asks for more memory than it fills, or for an unknown kind of tensor.

    container: the opened file, or None for the format that torch wrote before 1.6. Raises UnpicklingError if the file names
    any other function, and whatever the standard library's unpickler raises if the file is damaged.
    """
    size = path.stat().st_size
    if container is not None:
        # Read with torch's own reader: a second directory in the zip file could show zipfile another pickle.
        data = torch._C.PyTorchFileReader(str(path)).get_record("data.pkl")
        records = {entry.filename.partition("/")[2]: entry.file_size for entry in container.infolist()}
        _Checker(io.BytesIO(data), size, records).load()
        return
    with path.open("rb") as file:
        if _Checker(file, size).load() != torch.serialization.MAGIC_NUMBER:
            raise pickle.UnpicklingError("not a file of torch.save")
        for _ in ("version", "system", "contents", "keys of storages"):
            _Checker(file, size).load()


def _counted(load: Callable[[Any], None]) -> Callable[[_Checker], None]:
    """Return an opcode's function that raises InvalidFileError for more than MAX_CONTAINERS."""

    def load_counted(checker: _Checker) -> None:
        checker.containers += 1
        if checker.containers > MAX_CONTAINERS:
            raise InvalidFileError(f"it has more than {MAX_CONTAINERS:,} lists and tuples")
        load(checker)

    return load_counted


class _Checker(pickle._Unpickler):  # in Python: the C implementation allocates whatever an opcode claims
    """Read a pickle without calling the functions that it names.

    Args:
        size: bytes of the file, the limit for all storages together and for all values that functions copy.
        records: bytes of each part of the zip file by name; None for the format before torch 1.6.
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, file: IO[bytes], size: int, records: dict[str, int] | None = None) -> None:
        super().__init__(file, encoding="utf-8")
        self.size = size
        self.records = records
        self.storages: dict[str, _Storage] = {}
        self.stored = 0  # bytes of all storages
        self.copied = 0
        self.containers = 0
        self.tensors = 0
        self.tuple_keys = 0
        self.functions: dict[str, Callable[..., Any]] = {
            "torch._utils._rebuild_tensor": self.tensor,
            "torch._utils._rebuild_tensor_v2": self.tensor,
            "torch._utils._rebuild_tensor_v3": self.tensor_of_dtype,
            "torch._utils._rebuild_parameter": lambda tensor, *settings: tensor,
            "torch.Size": lambda sides: tuple(self.copy(sides)),
            "torch.device": lambda *place: None,
            "collections.OrderedDict": lambda pairs=(): OrderedDict(self.pairs(pairs)),
            "collections.Counter": lambda counts: Counter(self.copy(counts, dict)),
            "__builtin__.set": lambda values: set(self.keys(self.copy(values, list))),
            "__builtin__.bytearray": lambda content: bytearray(self.copy(content, bytes)),
            "__builtin__.complex": complex,
            "_codecs.encode": self.encode,
        }

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a function, or a dtype or type of storage; raise UnpicklingError for all others."""
        function = self.functions.get(f"{module.replace('builtins', '__builtin__')}.{name}")
        if function is not None:
            return function
        if module in ("torch", "torch.storage") and name in STORAGES:
            return name
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module.startswith("torch") and ("_rebuild_" in name or name.endswith(("Tensor", "Storage", "Parameter"))):
            raise InvalidFileError(UNKNOWN_TENSOR)
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")

    # ---- stand-ins for functions

    def copy(self, values: Any, kind: Any = (list, tuple)) -> Any:
        """Return `values`, which a function is about to copy; raise InvalidFileError if the copies exceed the file."""
        if not isinstance(values, kind):
            raise InvalidFileError("it asks for memory that it does not fill")
        self.copied += len(values)
        if self.copied > self.size:
            raise InvalidFileError("its values are copied too often")
        return values

    def encode(self, text: str, encoding: str) -> bytes:
        """Return a text as bytes, which are written as text."""
        if encoding != "latin1":
            raise InvalidFileError(f"it has bytes in the encoding {encoding!r:.40}")
        content: bytes = self.copy(text, str).encode("latin1")
        return content

    def pairs(self, pairs: Any) -> Any:
        """Return keys with their values, as Python 2 wrote them."""
        self.keys([key for key, _ in self.copy(pairs)])
        return pairs

    def persistent_load(self, pid: Any) -> _Storage:
        """Return the size of a storage; raise InvalidFileError if it is not that of the numbers in the file."""
        kind, storage, key, _, numel, *view = pid
        if kind != "storage" or storage not in STORAGES or type(key) is not str or any(view):
            raise InvalidFileError(UNKNOWN_TENSOR)
        itemsize = STORAGES[storage]
        claimed = _Storage(_whole(numel) * itemsize, itemsize)
        if self.records is not None:
            fits = self.records.get(f"data/{key}") == claimed.nbytes
        else:
            self.stored += 0 if key in self.storages else claimed.nbytes
            fits = self.storages.setdefault(key, claimed) == claimed and self.stored <= self.size
        if not fits:
            raise InvalidFileError(f"it has a tensor of {numel:,} numbers without the memory for them")
        return claimed

    def tensor(self, storage: Any, offset: Any, sides: Any, strides: Any, *settings: Any, itemsize: int = 0) -> _Tensor:
        """Raise InvalidFileError unless a storage holds all numbers of a tensor: torch would enlarge it, or repeat numbers."""
        if not isinstance(storage, _Storage) or not len(sides) == len(strides) <= MAX_SIDES:
            raise InvalidFileError(UNKNOWN_TENSOR)
        self.tensors += 1
        if self.tensors > MAX_TENSORS:
            raise InvalidFileError(f"it has more than {MAX_TENSORS:,} tensors")
        sides = [_whole(side) for side in sides]
        last = _whole(offset) + sum((side - 1) * _whole(stride) for side, stride in zip(sides, strides, strict=True))
        count = math.prod(sides)
        available = storage.nbytes // (itemsize or storage.itemsize)
        if count > available or (count > 0 and last >= available):
            raise InvalidFileError(f"it has a tensor of {count:,} numbers without the memory for them")
        return _Tensor()

    def tensor_of_dtype(self, storage: Any, offset: Any, sides: Any, strides: Any, *settings: Any) -> _Tensor:
        """Check a tensor of a dtype that has no type of storage, such as float8."""
        dtype = settings[2]
        return self.tensor(storage, offset, sides, strides, itemsize=dtype.itemsize)

    # ---- opcodes

    def keys(self, keys: Iterable[Any]) -> Iterable[Any]:
        """Return keys of a dict or a set; raise InvalidFileError if looking them up may take long."""
        for key in keys:
            if type(key) is tuple:
                self.tuple_keys += 1
                plain = self.tuple_keys <= MAX_TUPLE_KEYS and len(key) <= MAX_SIDES and all(map(_is_plain, key))
            else:
                plain = _is_plain(key)
            if not plain:
                raise InvalidFileError("its values have names that no training wrote")
        return keys

    def set_items(self, items: list[Any]) -> None:
        """Put keys and values, which take turns, into the dict on top of the stack."""
        self.keys(items[::2])
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise pickle.UnpicklingError("items outside a dict")
        target.update(zip(items[::2], items[1::2], strict=True))

    def load_setitems(self) -> None:
        """Put the items above the last mark into a dict."""
        self.set_items(self.pop_mark())

    def load_setitem(self) -> None:
        """Put one item into a dict."""
        items = self.stack[-2:]
        del self.stack[-2:]
        self.set_items(items)

    def load_build(self) -> None:
        """Drop the attributes of an OrderedDict; torch copies them."""
        self.copy(self.stack.pop(), dict)
        if not isinstance(self.stack[-1], OrderedDict):
            raise InvalidFileError(UNKNOWN_TENSOR)

    def load_unknown(self) -> None:
        """Raise UnpicklingError for an opcode that torch.save does not write."""
        raise pickle.UnpicklingError("an opcode that torch.save does not write")

    dispatch: ClassVar[Any] = dict.fromkeys(range(256), load_unknown)
    dispatch |= {code[0]: pickle._Unpickler.dispatch[code[0]] for code in PLAIN}
    dispatch |= {code[0]: _counted(pickle._Unpickler.dispatch[code[0]]) for code in CONTAINERS}
    dispatch |= {pickle.SETITEM[0]: load_setitem, pickle.SETITEMS[0]: load_setitems, pickle.BUILD[0]: load_build}


def _is_plain(value: Any) -> bool:
    """Whether a value is a short number, a text or the like, which Python hashes in no time and without many equal hashes."""
    return type(value) in (str, bytes, float, bool, NoneType, torch.dtype) or (
        type(value) is int and abs(value) < MAX_KEY
    )


def _whole(value: Any) -> int:
    """Return an integer from 0 to 2⁶³ - 1; raise InvalidFileError for any other value."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise InvalidFileError(UNKNOWN_TENSOR)
    return value
