"""Limit what the pickle of a checkpoint demands, before `torch.load` reads it.

`torch.load(weights_only=True)` executes no foreign code. It also refuses a storage that differs in size from its
record, and a view that is larger than its storage. But torch 2.11 to 2.15 do not limit the memory and time that a small
file costs:

- They call `bytearray(10**9)` and `torch.Tensor(10**9)`.
- They let functions copy the same value any number of times, and create a list for every byte of the file.
- They hash the keys of dicts, in quadratic time if hashes are equal, in exponential time for nested tuples.
- In the format before torch 1.6, they allocate a storage before they check its size.

`check_pickles` reads the same pickle with harmless stand-ins for all functions, and creates no tensors.
`checkpoint.read_checkpoint` then checks the tensors that `torch.load` returns.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from types import NoneType
from typing import IO, Any, ClassVar
from zipfile import ZipFile

import torch

from cifar_lit.errors import InvalidFileError

# A tensor has about eight lists and tuples.
LIMITS = {"lists and tuples": 500_000, "tensors": 10_000, "storages": 10_000, "tuples as keys": 1000}
MAX_KEY = 2**61  # larger integers can have equal hashes
MAX_KEY_LENGTH = 64  # elements of a tuple
PLAIN = (  # opcodes of protocol 2 that take no more memory than their bytes in the file
    pickle.PROTO, pickle.STOP, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1,
    pickle.BININT2, pickle.LONG1, pickle.BINFLOAT, pickle.BINUNICODE, pickle.SHORT_BINSTRING, pickle.GLOBAL,
    pickle.REDUCE, pickle.BINPERSID, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET,
    pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.APPEND, pickle.APPENDS,
)  # fmt: skip
# One byte in the file, about 64 in memory.
CONTAINERS = (pickle.MARK, pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
NAMESPACE = "argparse.Namespace"
UNKNOWN_TENSOR = "it has a tensor of an unsupported kind"


def check_pickles(path: Path, container: ZipFile | None) -> None:
    """Raise InvalidFileError if a file of torch.save demands too much memory, or has an unsupported kind of tensor.

    Raises UnpicklingError for an unknown function, and any error of the standard unpickler for a damaged file.

    Args:
        path: the file.
        container: the opened zip file, or None for the format before torch 1.6.
    """
    size = path.stat().st_size
    if container is not None:
        # Use torch's own reader, because zipfile may find another pickle through a second directory in the file.
        _Checker(io.BytesIO(torch._C.PyTorchFileReader(str(path)).get_record("data.pkl")), size).load()
        return
    with path.open("rb") as file:
        if _Checker(file, size).load() != torch.serialization.MAGIC_NUMBER:
            raise pickle.UnpicklingError("not a file of torch.save")
        for _ in ("version", "system", "contents", "keys of storages"):
            _Checker(file, size).load()


def _counted(load: Callable[[Any], None]) -> Callable[[_Checker], None]:
    """Return the function of an opcode that creates a container, with a limit on the number of containers."""

    def load_counted(checker: _Checker) -> None:
        checker.count("lists and tuples")
        load(checker)

    return load_counted


class _Checker(pickle._Unpickler):  # in Python: the C implementation allocates whatever an opcode claims
    """Read a pickle without calling the functions that it names. Tensors, storages and types become None.

    Args:
        file: the pickle.
        size: bytes of the checkpoint, the limit for all numbers in storages and for all values that functions copy.
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, file: IO[bytes], size: int) -> None:
        super().__init__(file, encoding="utf-8")
        self.limits = {**LIMITS, "numbers in tensors": size, "copied values": size}
        self.counts: Counter[str] = Counter()
        self.storages: set[str] = set()
        self.functions: dict[str, Callable[..., Any]] = {
            "torch._utils._rebuild_tensor": self.tensor,
            "torch._utils._rebuild_tensor_v2": self.tensor,
            "torch._utils._rebuild_tensor_v3": self.tensor,
            "torch._utils._rebuild_parameter": lambda *arguments: None,
            "torch.Size": lambda sides: tuple(self.copy(sides)),
            "torch.device": lambda *arguments: None,
            "collections.OrderedDict": lambda pairs=(): OrderedDict(self.pairs(pairs)),
            "collections.Counter": lambda counts: Counter(self.copy(counts, dict)),
            "__builtin__.set": lambda values: set(self.keys(self.copy(values, list))),
            "__builtin__.bytearray": lambda content: bytearray(self.copy(content, bytes)),
            "__builtin__.complex": complex,
            "_codecs.encode": self.encode,
            NAMESPACE: lambda: OrderedDict(),
        }

    def count(self, kind: str, number: int = 1) -> None:
        """Add to a count. Raise InvalidFileError if it exceeds its limit."""
        self.counts[kind] += number
        if self.counts[kind] > self.limits[kind]:
            raise InvalidFileError(f"it has more than {self.limits[kind]:,} {kind}")

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a function, None for a dtype or type of storage; raise UnpicklingError for others."""
        function = self.functions.get(f"{module.replace('builtins', '__builtin__')}.{name}")
        if function is not None:
            return function
        is_type = name.endswith("Storage") or isinstance(getattr(torch, name, None), torch.dtype)
        if module in ("torch", "torch.storage") and is_type:
            return None
        if module.startswith("torch") and ("_rebuild_" in name or name.endswith(("Tensor", "Storage", "Parameter"))):
            raise InvalidFileError(UNKNOWN_TENSOR)
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")

    # ---- stand-ins for functions

    def copy(self, values: Any, kind: Any = (list, tuple)) -> Any:
        """Return values that a function copies, and count them."""
        if not isinstance(values, kind):
            raise InvalidFileError("it requests memory that it does not fill")
        self.count("copied values", len(values))
        return values

    def encode(self, text: str, encoding: str) -> bytes:
        """Return bytes that are stored as text."""
        if encoding != "latin1":
            raise InvalidFileError(f"it has bytes in the encoding {encoding!r:.40}")
        content: bytes = self.copy(text, str).encode("latin1")
        return content

    def pairs(self, pairs: Any) -> Any:
        """Return the items of an OrderedDict as Python 2 wrote them."""
        self.keys([key for key, _ in self.copy(pairs)])
        return pairs

    def persistent_load(self, pid: Any) -> None:
        """Count the numbers in a storage. `torch.load` itself compares this count with the file."""
        _, _, key, _, numel, *view = pid
        if type(key) is not str or type(numel) is not int or numel < 0 or any(view):
            raise InvalidFileError(UNKNOWN_TENSOR)
        if key not in self.storages:
            self.storages.add(key)
            self.count("storages")
            self.count("numbers in tensors", numel)

    def tensor(self, storage: Any, offset: Any, sides: Any, strides: Any, *settings: Any) -> None:
        """Count a tensor."""
        self.count("tensors")
        self.copy(sides)
        self.copy(strides)

    # ---- opcodes

    def keys(self, keys: Iterable[Any]) -> Iterable[Any]:
        """Return keys of a dict or a set. Raise InvalidFileError if hashing them may take long."""
        for key in keys:
            parts = key if type(key) is tuple else (key,)
            if parts is key:
                self.count("tuples as keys")
            if len(parts) > MAX_KEY_LENGTH or not all(map(_is_plain, parts)):
                raise InvalidFileError("it has keys of an unsupported kind")
        return keys

    def set_items(self, items: list[Any]) -> None:
        """Put alternating keys and values into the dict on top of the stack."""
        self.keys(items[::2])
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.stack[-1][key] = value

    def load_newobj(self) -> None:
        """Create an empty argparse.Namespace, as torch does without calling it."""
        arguments, function = self.stack.pop(), self.stack.pop()
        if function is not self.functions[NAMESPACE] or arguments != ():
            raise pickle.UnpicklingError("GLOBAL of another class")
        self.count("lists and tuples")
        self.stack.append(function())

    def load_setitems(self) -> None:
        """Put the items above the last mark into a dict."""
        self.set_items(self.pop_mark())

    def load_setitem(self) -> None:
        """Put one item into a dict."""
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def load_build(self) -> None:
        """Drop the attributes of an OrderedDict, which torch copies."""
        self.copy(self.stack.pop(), dict)
        if not isinstance(self.stack[-1], OrderedDict):
            raise InvalidFileError(UNKNOWN_TENSOR)

    def load_unknown(self) -> None:
        """Raise UnpicklingError."""
        raise pickle.UnpicklingError("an opcode that torch.save does not write")

    dispatch: ClassVar[Any] = dict.fromkeys(range(256), load_unknown)
    dispatch |= {code[0]: pickle._Unpickler.dispatch[code[0]] for code in PLAIN}
    dispatch |= {code[0]: _counted(pickle._Unpickler.dispatch[code[0]]) for code in CONTAINERS}
    dispatch |= {pickle.SETITEM[0]: load_setitem, pickle.SETITEMS[0]: load_setitems, pickle.BUILD[0]: load_build}
    dispatch[pickle.NEWOBJ[0]] = load_newobj


def _is_plain(value: Any) -> bool:
    """Return whether hashing a value is fast, and few such values have equal hashes."""
    return type(value) in (str, bytes, float, bool, NoneType) or (type(value) is int and abs(value) < MAX_KEY)
