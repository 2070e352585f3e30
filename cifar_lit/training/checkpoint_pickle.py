"""Limit what the pickle of a checkpoint demands, before `torch.load` reads it.

`torch.load(weights_only=True)` executes no foreign code. It also refuses a storage that differs in size from its
record, and a view that is larger than its storage. But torch 2.11 to 2.15 do not limit the memory and time that a small
file costs: they call `bytearray(10**9)`, let functions copy one value any number of times, hash keys of equal hashes
and, in the format before torch 1.6, allocate a storage before they check its size.
"""

from __future__ import annotations

import io
import pickletools
from collections import Counter
from pathlib import Path
from pickle import UnpicklingError
from types import NoneType
from typing import IO, Any, NamedTuple

import torch

from cifar_lit.errors import InvalidFileError

# Functions that torch.save names.
TENSORS = {f"torch._utils _rebuild_{kind}" for kind in ("tensor", "tensor_v2", "tensor_v3", "parameter")}
# The type of the values that each of these copies.
COPIES = {"collections OrderedDict": dict, "collections Counter": dict, "torch Size": tuple}
CALLS = {*TENSORS, *COPIES, "torch device"}
NAMESPACE = "argparse Namespace"
# A tensor takes about 32 opcodes and two calls: its own, and an OrderedDict for its hooks.
LIMITS = {"opcodes": 500_000, "calls": 30_000, "copied values": 1_000_000}
CONSTANTS = {"NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"}
EMPTY = {"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict}
UNKNOWN_TENSOR = "it has a tensor of an unsupported kind"


class _Global(NamedTuple):
    """A function or type that a pickle names: module and name, with a space between them."""

    name: str


def check_pickles(path: Path, is_zip: bool) -> None:
    """Raise InvalidFileError if a file of torch.save demands too much memory, or has an unsupported kind of tensor.

    Raises any other error for an unknown function or a damaged file. is_zip: whether it is a zip file.
    """
    checker = _Checker(path.stat().st_size)
    if is_zip:
        # Use torch's own reader, because zipfile may find another pickle through a second directory in the file.
        checker.check(io.BytesIO(torch._C.PyTorchFileReader(str(path)).get_record("data.pkl")))
        return
    with path.open("rb") as file:
        for _ in ("magic number", "version", "system", "contents", "keys of storages"):
            checker.check(file)


class _Checker:
    """Count what the pickles of a file demand. size: bytes of the file, the limit for all numbers in its storages."""

    def __init__(self, size: int) -> None:
        self.limits = {**LIMITS, "numbers in tensors": size}
        self.counts: Counter[str] = Counter()
        self.storages: set[str] = set()

    def count(self, kind: str, number: int = 1) -> None:
        """Add to a count. Raise InvalidFileError if it exceeds its limit."""
        self.counts[kind] += number
        if self.counts[kind] > self.limits[kind]:
            raise InvalidFileError(f"it has more than {self.limits[kind]:,} {kind}")

    def check(self, file: IO[bytes]) -> None:
        """Follow the opcodes of a pickle without calling anything. On the stack, None stands for a tensor."""
        stack: list[Any] = []
        marks: list[int] = []
        memo: dict[int, object] = {}
        argument: Any
        for opcode, argument, _ in pickletools.genops(file):
            self.count("opcodes")
            match opcode.name:
                case "BINPUT" | "LONG_BINPUT":
                    memo[argument] = stack[-1]
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[argument])
                case name if name in CONSTANTS:
                    stack.append(argument)
                case name if name in EMPTY:
                    stack.append(EMPTY[name]())
                case "MARK":
                    marks.append(len(stack))
                case "TUPLE":
                    stack.append(tuple(_taken(stack, marks.pop())))
                case "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                    stack.append(tuple(_taken(stack, -int(name[-1]))))
                case "APPEND" | "APPENDS" as name:
                    items = _taken(stack, -1 if name == "APPEND" else marks.pop())
                    stack[-1].extend(items)
                case "SETITEM" | "SETITEMS" as name:
                    items = _taken(stack, -2 if name == "SETITEM" else marks.pop())
                    if not all(map(_is_plain, items[::2])):
                        raise InvalidFileError("it has keys of an unsupported kind")
                    stack[-1].update(zip(items[::2], items[1::2], strict=True))
                case "GLOBAL":
                    stack.append(_allowed(argument))
                case "REDUCE":
                    stack.append(self.result(*_taken(stack, -2)))
                case "NEWOBJ":
                    if _taken(stack, -2) != [_Global(NAMESPACE), ()]:
                        raise UnpicklingError("GLOBAL of another class")
                    stack.append({})
                case "BUILD":
                    attributes = stack.pop()
                    if not isinstance(attributes, dict) or not isinstance(stack[-1], dict):
                        raise InvalidFileError(UNKNOWN_TENSOR)
                    self.count("copied values", len(attributes))
                case "BINPERSID":
                    self.storage(*stack.pop())
                    stack.append(None)
                case "PROTO" | "STOP":
                    pass
                case _:
                    raise UnpicklingError("an opcode that torch.save does not write")

    def result(self, function: object, arguments: tuple[object, ...]) -> Any:
        """Return what stands for the result of a call. Count the values that it copies."""
        name = function.name if isinstance(function, _Global) else ""
        if name not in CALLS:
            raise UnpicklingError(f"GLOBAL {name} is not a function")
        self.count("calls")
        for values in (arguments, *arguments):
            if isinstance(values, str | tuple | list | dict):
                self.count("copied values", len(values))
        if name not in COPIES:
            return None
        if not arguments:
            return {}
        if not isinstance(arguments[0], COPIES[name]):
            raise InvalidFileError("its values have an unsupported kind")
        return arguments[0]

    def storage(self, _: str, kind: object, key: object, device: object, numel: object, view: object = None) -> None:
        """Count the numbers in a storage, whose size `torch.load` compares with that in the file."""
        if type(key) is not str or type(numel) is not int or numel < 0 or view:
            raise InvalidFileError(UNKNOWN_TENSOR)
        if key not in self.storages:
            self.storages.add(key)
            self.count("numbers in tensors", numel)


def _taken(stack: list[Any], start: int) -> list[Any]:
    """Remove the values of a stack from an index on, and return them."""
    values = stack[start:]
    del stack[start:]
    return values


def _is_plain(key: Any) -> bool:
    """Return whether hashing a key is fast, and few such keys have equal hashes."""
    return type(key) in (str, float, NoneType) or (type(key) is int and abs(key) < 2**61)


def _allowed(name: str) -> _Global:
    """Return a function or type that torch.save may name. Raise InvalidFileError or UnpicklingError for others."""
    module, _, last = name.partition(" ")
    is_type = last.endswith("Storage") or isinstance(getattr(torch, last, None), torch.dtype)
    if name in CALLS or name == NAMESPACE or (module in ("torch", "torch.storage") and is_type):
        return _Global(name)
    if module.startswith("torch") and ("_rebuild_" in last or last.endswith(("Tensor", "Storage", "Parameter"))):
        raise InvalidFileError(UNKNOWN_TENSOR)
    raise UnpicklingError(f"GLOBAL {name}")
