"""Checkpoints and `model.safetensors` files, made from genuine ones, that try to run code or exhaust memory.

Code executed from a file creates the folder `ran` in the working folder.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from cifar_lit.runs.model_file import ModelCard

Maker = Callable[[Path], object]  # replaces the genuine file with a hostile one


class Gadget:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def content(data: bytes | Callable[[], bytes]) -> Maker:
    """A file of these bytes."""
    return lambda path: path.write_bytes(data() if callable(data) else data)


def kernel_log(path: Path) -> None:
    """A link to a regular file of size 0; reading it blocks until the next kernel message."""
    path.unlink(missing_ok=True)
    path.symlink_to("/proc/kmsg")


def _with(**values: Any) -> Maker:
    """The genuine checkpoint with other values."""

    def make(path: Path) -> None:
        torch.save({**torch.load(path, weights_only=True), **values}, path)

    return make


def _weights(value: Any) -> Maker:
    """The genuine checkpoint with every weight replaced by this value."""

    def make(path: Path) -> None:
        contents = torch.load(path, weights_only=True)
        torch.save({**contents, "state_dict": dict.fromkeys(contents["state_dict"], value)}, path)

    return make


def _views(count: int) -> Maker:
    """A checkpoint of `count` tensors that share one storage."""

    def make(path: Path) -> None:
        whole = torch.arange(4.0)
        torch.save({"state_dict": {f"w{number}": whole[:1] for number in range(count)}}, path)

    return make


def _zip_with(data: bytes, padding: int = 0) -> Maker:
    """The genuine zip with another pickle, or with a compressed storage of `padding` zero bytes."""

    def make(path: Path) -> None:
        with zipfile.ZipFile(path) as genuine:
            parts = {name: genuine.read(name) for name in genuine.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if padding else zipfile.ZIP_STORED) as container:
            for name, part in parts.items():
                if padding and name.endswith("/data/0"):
                    part = bytes(padding)
                container.writestr(name, data if data and name.endswith("data.pkl") else part)

    return make


def _nested(levels: int) -> Any:
    value: Any = [0]
    for _ in range(levels):
        value = [value, value]
    return value


LOOPED: list[Any] = []
LOOPED.append(LOOPED)
STRIDED = torch.zeros(1).expand(10**12)
MKDIR = Gadget(os.mkdir, "ran")


def _old_format(contents: Any) -> bytes:
    file = io.BytesIO()
    torch.save(contents, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def _legacy_claim() -> bytes:
    """A file in torch's format before 1.6 whose storage claims 2³⁰ numbers and contains none."""
    data = _old_format({"state_dict": {"weight": torch.zeros(64_321)}})
    return data.replace((64_321).to_bytes(4, "little"), (2**30).to_bytes(4, "little"))[: -4 * 64_321]


def _reduced(function: bytes, arguments: bytes) -> bytes:
    """Opcodes that call a function by its name in protocol 2; `arguments` are opcodes that build a tuple."""
    return b"c" + function.replace(b".", b"\n") + b"\n" + arguments + b"R"


_BYTEARRAY = b"\x80\2" + _reduced(b"__builtin__.bytearray", b"J\0\0\0\x7f\x85") + b"."
_STORAGE = b"\x80\2ctorch.storage\nUntypedStorage\nJ\0\0\0\x7f\x85R."
_TUPLE = b"(" + b"K\1" * 100_000 + b"t"
_DICT = b"}(" + b"".join(b"J" + number.to_bytes(4, "little") + b"N" for number in range(50_000)) + b"u"


def _called_often(value: bytes, call: bytes) -> Maker:
    """A pickle with one value and a list of 5000 calls that take it."""
    return _zip_with(b"\x80\2}K\1](" + value + b"q\0" + call * 5000 + b"es.")


def _keys_of_equal_hash(count: int) -> bytes:
    """A pickle of a dict whose integer keys have the same hash in Python."""
    numbers = ((2**61 - 1) * number for number in range(1, count + 1))
    return b"\x80\2}(" + b"".join(b"\x8a\x0a" + number.to_bytes(10, "little") + b"N" for number in numbers) + b"u."


def _two_pickles(path: Path) -> None:
    """A zip with two members of the same name."""
    with zipfile.ZipFile(path, "a") as container, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        name = next(name for name in container.namelist() if name.endswith("data.pkl"))
        container.writestr(name, _BYTEARRAY)


def _tarred() -> bytes:
    file, data = io.BytesIO(), pickle.dumps(MKDIR)
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name in ("pickle", "storages", "tensors"):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


CHECKPOINTS: dict[str, Maker] = {
    "a gadget (os.system) in the weights": _with(state_dict=Gadget(os.system, "mkdir ran")),
    "a bare pickle with os.mkdir": content(pickle.dumps(MKDIR)),
    "a pickle in a tar of torch 0.1": content(_tarred),
    "a zip whose pickle is a gadget": _zip_with(pickle.dumps(MKDIR, 2)),
    "a bytearray of 2 GB in the pickle of a zip": _zip_with(_BYTEARRAY),
    "the same in the last pickle of the old format": content(lambda: _old_format({})[:-6] + _BYTEARRAY),
    "the same in a second pickle of the same name": _two_pickles,
    "a call of a storage's type for 2 GB": _zip_with(_STORAGE),
    "a tuple that becomes a torch.Size 5000 times": _called_often(_TUPLE, _reduced(b"torch.Size", b"h\0\x85")),
    "a dict that is copied into 5000 others": _called_often(
        _DICT, _reduced(b"collections.OrderedDict", b")") + b"h\0b"
    ),
    "20,000 views of one storage": _views(20_000),
    "8 million empty dicts": _zip_with(b"\x80\2](" + b"}" * 8_000_000 + b"e."),
    "a key of 60 nested tuples with two equal items": _zip_with(b"\x80\2}K\1" + b"q\0h\0\x86" * 60 + b"Ns."),
    "100,000 keys of equal hash": _zip_with(_keys_of_equal_hash(100_000)),
    "a storage that unpacks to 512 MB": _zip_with(b"", 512 << 20),
    "a pickle that claims a text of 4 GB": _zip_with(b"\x80\x02X\xff\xff\xff\xff."),
    "a pickle of 100,000 opening brackets": _zip_with(b"\x80\x02" + b"(" * 100_000 + b"l" * 100_000 + b"."),
    "a storage in the old format that claims 4 GB": content(_legacy_claim),
    "a tensor of 10¹² numbers by its strides": _weights(STRIDED),
    "a random state of 10¹² numbers": _with(random_state=[STRIDED.unsqueeze(0)]),
    "40 nested lists with two equal items": _with(hyper_parameters={"input_shape": _nested(40), "net": "lenet"}),
    "a list that contains itself": _with(hyper_parameters={"input_shape": LOOPED}),
    "weights on the meta device": _weights(torch.zeros(3, device="meta")),
    "sparse weights": _weights(torch.zeros(4, 4).to_sparse()),
    "weights that are numbers": _weights(3),
    "weights by number": _with(state_dict={1: torch.zeros(1)}),
    "a list instead of a dict": lambda path: torch.save([1, 2, 3], path),
    "settings of wrong kinds": _with(
        state_dict={"x": torch.zeros(1)}, hyper_parameters={"width": [1], "input_shape": 7, "net": "\x1b[2J" * 9}
    ),
    "a step of 10³⁰": _with(global_step=10**30),
    "random bytes after the signature of a zip": content(b"PK\3\4" + os.urandom(4096)),
}


def _header(header: Any, data: bytes = b"") -> Maker:
    """A safetensors file with this header (raw bytes, or a value to be written as JSON)."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return content(len(text).to_bytes(8, "little") + text + data)


def _metadata(card: dict[str, Any] | str) -> dict[str, Any]:
    return {"__metadata__": {"format": "cifar-lit 1", "card": card if isinstance(card, str) else json.dumps(card)}}


CARD = asdict(ModelCard("lenet", 1.0, [3, 32, 32], ["a", "b"], [0.5] * 3, [0.5] * 3))


def _card(**values: Any) -> Maker:
    """A file of a few hundred bytes: a card with these values and no weights."""
    return _header(_metadata({**CARD, **values}))


def _one(dtype: str, shape: list[int], offsets: list[int], data: bytes = b"") -> Maker:
    tensor = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    return _header({**_metadata(CARD), "0.weight": tensor}, data)


MODELS: dict[str, Maker] = {
    "a tensor of 4 GB in a file of 300 bytes": _one("F32", [2**30], [0, 2**32]),
    "two tensors at the same offsets": _header(
        {n: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for n in "ab"} | _metadata(CARD), bytes(8)
    ),
    "a shape whose size exceeds 64 bits": _one("F32", [2**40, 2**40], [0, 4], bytes(4)),
    "a header of 64 MB of blanks": content(
        lambda: (2 + (64 << 20)).to_bytes(8, "little") + b"{" + b" " * (64 << 20) + b"}"
    ),
    "a header nested 100,000 deep": _header(b'{"a":' * 100_000),
    "a card nested 100,000 deep": _header(_metadata("[" * 100_000)),
    "a net of 1000 times the width": _card(width=1000.0),
    "images of 10⁹ pixels a side": _card(input_shape=[3, 10**9, 10**9]),
    "images of 2048 pixels a side in a dense layer": _card(input_shape=[3, 2048, 2048]),
    "10⁵ classes and torchvision's largest net": _card(
        net="vit_h_14", input_shape=[3, 224, 224], classes=["a"] * 100_000
    ),
    "a net of 2.6 GB in a file of 300 bytes": _card(net="regnet_y_128gf"),
    "groups of 10⁹ layers": _card(net="whitened", options={"depth": 10**9}),
    "a net option that is a class path": _card(options={"class_path": "os.system"}),
    "weights declared as integers": lambda path: path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"')),
    "a model that is a link to the kernel log": kernel_log,
    "a pickle instead of a model": content(pickle.dumps(MKDIR)),
}
