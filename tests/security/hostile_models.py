"""Checkpoints and `model.safetensors` that want to run code or to take memory; made from those of a genuine run."""

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from security.sandbox import Sandbox

Maker = Callable[[Sandbox], Path]  # makes a hostile file, and returns its place


class Gadget:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def _genuine(sandbox: Sandbox) -> dict[str, Any]:
    contents: dict[str, Any] = torch.load(sandbox.checkpoint, weights_only=True)
    return contents


def _saved(change: Callable[[dict[str, Any], Sandbox], Any], **how: Any) -> Maker:
    """Writes the genuine checkpoint after a change."""

    def make(sandbox: Sandbox) -> Path:
        contents = _genuine(sandbox)
        changed = change(contents, sandbox)
        torch.save(contents if changed is None else changed, sandbox.checkpoint, **how)
        return sandbox.checkpoint

    return make


def _with(**values: Callable[[Sandbox], Any]) -> Maker:
    return _saved(lambda contents, sandbox: contents.update({name: value(sandbox) for name, value in values.items()}))


def _bytes(content: Callable[[bytes, Sandbox], bytes]) -> Maker:
    """Writes other bytes in the place of the genuine checkpoint."""

    def make(sandbox: Sandbox) -> Path:
        sandbox.checkpoint.write_bytes(content(sandbox.checkpoint.read_bytes(), sandbox))
        return sandbox.checkpoint

    return make


def _zip_with(data: bytes, padding: int = 0) -> Maker:
    """A zip as torch's with other contents: a packed storage of `padding` zero bytes for each byte it takes of the disk."""

    def make(sandbox: Sandbox) -> Path:
        with zipfile.ZipFile(sandbox.checkpoint) as genuine:
            parts = {name: genuine.read(name) for name in genuine.namelist()}
        with zipfile.ZipFile(sandbox.checkpoint, "w", zipfile.ZIP_DEFLATED if padding else zipfile.ZIP_STORED) as container:
            for name, content in parts.items():
                if padding and name.endswith("/data/0"):
                    with container.open(name, "w") as entry:
                        for _ in range(padding >> 20):
                            entry.write(bytes(1 << 20))
                else:
                    container.writestr(name, data if data and name.endswith("data.pkl") else content)
        return sandbox.checkpoint

    return make


def _nested(levels: int) -> Any:
    value: Any = [0]
    for _ in range(levels):
        value = [value, value]
    return value


def _looped() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


def _strided(numbers: int) -> torch.Tensor:
    return torch.zeros(1).expand(numbers)


def _weights(value: Any) -> Callable[[dict[str, Any], Sandbox], None]:
    def change(contents: dict[str, Any], sandbox: Sandbox) -> None:
        contents["state_dict"] = dict.fromkeys(contents["state_dict"], value)

    return change


def _legacy_claim(content: bytes, sandbox: Sandbox) -> bytes:
    """torch's format of before 1.6, whose storage claims 2^30 numbers and has none."""
    old = io.BytesIO()
    torch.save({"state_dict": {"weight": torch.zeros(64_321)}}, old, _use_new_zipfile_serialization=False)
    claimed = old.getvalue().replace((64_321).to_bytes(4, "little"), (2**30).to_bytes(4, "little"))
    return claimed[: len(claimed) - 4 * 64_321]


def _tarred(content: bytes, sandbox: Sandbox) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name in ("pickle", "storages", "tensors"):
            info = tarfile.TarInfo(name)
            data = pickle.dumps(Gadget(os.mkdir, str(sandbox.trace)))
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


def _pickled(function: Any, argument: Callable[[Sandbox], Any]) -> Maker:
    return _bytes(lambda content, sandbox: pickle.dumps(Gadget(function, argument(sandbox))))


def _trace(sandbox: Sandbox) -> str:
    return str(sandbox.trace)


def _shell(sandbox: Sandbox) -> str:
    return f"mkdir {sandbox.trace}"


CHECKPOINTS: dict[str, Maker] = {
    "a gadget (os.mkdir) in the settings": _with(hyper_parameters=lambda sandbox: Gadget(os.mkdir, _trace(sandbox))),
    "a gadget (os.system) in the weights": _with(state_dict=lambda sandbox: Gadget(os.system, _shell(sandbox))),
    "a gadget (eval) in the callbacks": _with(
        callbacks=lambda sandbox: Gadget(eval, f"__import__('os').mkdir('{sandbox.trace}')")
    ),
    "a gadget (exec) in the old format": _saved(
        lambda contents, sandbox: contents.update(loops=Gadget(exec, f"import os; os.mkdir({_trace(sandbox)!r})")),
        _use_new_zipfile_serialization=False,
    ),
    "a bare pickle with os.system": _pickled(os.system, _shell),
    "a bare pickle with os.mkdir": _pickled(os.mkdir, _trace),
    "a pickle in a tar of torch 0.1": _bytes(_tarred),
    "a zip whose pickle is a gadget": lambda sandbox: _zip_with(pickle.dumps(Gadget(os.mkdir, _trace(sandbox)), 2))(sandbox),
    "a bytearray of 64 GB by a call that is allowed": _pickled(bytearray, lambda sandbox: 1 << 36),
    "a storage that unpacks to 512 MB": _zip_with(b"", 512 << 20),
    "a pickle that claims a text of 4 GB": _zip_with(b"\x80\x02X\xff\xff\xff\xff."),
    "a pickle of 100,000 opening brackets": _zip_with(b"\x80\x02" + b"(" * 100_000 + b"l" * 100_000 + b"."),
    "a storage in the old format that claims 4 GB": _bytes(_legacy_claim),
    "a tensor of 10¹² numbers by its strides": _saved(_weights(_strided(10**12))),
    "a random state of 10¹² numbers": _with(random_state=lambda sandbox: [_strided(10**12).unsqueeze(0)]),
    "lists that hold themselves twice, 40 times over": _with(
        hyper_parameters=lambda sandbox: {"input_shape": _nested(40), "net": "lenet"}
    ),
    "a list that holds itself": _with(hyper_parameters=lambda sandbox: {"input_shape": _looped()}),
    "weights on the meta device": _saved(_weights(torch.zeros(3, device="meta"))),
    "sparse weights": _saved(_weights(torch.zeros(4, 4).to_sparse())),
    "weights that are numbers": _saved(_weights(3)),
    "weights by number": _with(state_dict=lambda sandbox: {1: torch.zeros(1)}),
    "no dict": _saved(lambda contents, sandbox: [1, 2, 3]),
    "settings of wrong kinds": _saved(
        lambda contents, sandbox: contents.update(
            state_dict={"x": torch.zeros(1)}, hyper_parameters={"width": [1], "input_shape": 7, "net": "\x1b[2J" * 9}
        )
    ),
    "a step of 10³⁰": _with(global_step=lambda sandbox: 10**30),
    "its first half": _bytes(lambda content, sandbox: content[: len(content) // 2]),
    "its second half": _bytes(lambda content, sandbox: content[len(content) // 2 :]),
    "nothing": _bytes(lambda content, sandbox: b""),
    "random bytes after the zip's first four": _bytes(lambda content, sandbox: b"PK\3\4" + os.urandom(4096)),
}


def _header(header: Any, data: bytes = b"", length: int | None = None) -> Maker:
    """A safetensors file with this header (JSON, or bytes as they are)."""

    def make(sandbox: Sandbox) -> Path:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        sandbox.model.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
        return sandbox.model

    return make


def _metadata(card: dict[str, Any] | str) -> dict[str, Any]:
    return {"__metadata__": {"format": "cifar-lit 1", "card": card if isinstance(card, str) else json.dumps(card)}}


CARD: dict[str, Any] = {
    "net": "lenet", "width": 1.0, "input_shape": [3, 32, 32], "classes": ["a", "b"], "mean": [0.5] * 3, "std": [0.5] * 3,
}  # fmt: skip


def _card(**values: Any) -> Maker:
    """A file of some hundred bytes: a card with these values, and no weights."""
    return _header(_metadata({**CARD, **values}))


def _one(dtype: str, shape: list[int], offsets: list[int], data: bytes = b"") -> Maker:
    tensor = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    return _header({**_metadata(CARD), "0.weight": tensor}, data)


def _sparse_file(sandbox: Sandbox) -> Path:
    """4 GB of a hole in the disk, with a true header."""
    tensor = {"dtype": "F32", "shape": [2**30], "data_offsets": [0, 2**32]}
    _header({**_metadata(CARD), "0.weight": tensor})(sandbox)
    with sandbox.model.open("r+b") as file:
        file.truncate(file.seek(0, 2) + 2**32)
    return sandbox.model


def _dtypes(kind: str) -> Maker:
    """The genuine weights, claimed to be of another kind of the same length."""

    def make(sandbox: Sandbox) -> Path:
        sandbox.model.write_bytes(sandbox.model.read_bytes().replace(b'"F32"', f'"{kind}"'.encode()))
        return sandbox.model

    return make


def _not_finite(sandbox: Sandbox) -> Path:
    content = sandbox.model.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    sandbox.model.write_bytes(content[:start] + b"\xff" * (len(content) - start))
    return sandbox.model


MODELS: dict[str, Maker] = {
    "a tensor of 4 GB in a file of 300 bytes": _one("F32", [2**30], [0, 2**32]),
    "a tensor that ends before it begins": _one("F32", [1], [8, 4], bytes(8)),
    "two tensors in the same place": _header(
        {n: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for n in "ab"} | _metadata(CARD), bytes(8)
    ),
    "a shape of more numbers than 64 bits count": _one("F32", [2**40, 2**40], [0, 4], bytes(4)),
    "a dtype that does not exist": _one("F3", [1], [0, 4], bytes(4)),
    "a true header over a hole of 4 GB": _sparse_file,
    "a header that claims 4 GB": _header(_metadata(CARD), length=2**32),
    "a header that claims 2⁶⁴ - 1 bytes": _header(_metadata(CARD), length=2**64 - 1),
    "a header of 64 MB of blanks": _header(b"{" + b" " * (64 << 20) + b"}"),
    "a header nested 100,000 deep": _header(b'{"a":' * 100_000),
    "a card nested 100,000 deep": _header(_metadata("[" * 100_000)),
    "a card that is a list": _header(_metadata("[1, 2]")),
    "a net of 10⁹ times the width": _card(width=1e9),
    "a net of 1000 times the width": _card(width=1000.0),
    "a width that is not a number": _card(width=float("nan")),
    "images of 10⁹ pixels a side": _card(input_shape=[3, 10**9, 10**9]),
    "images of 2048 pixels a side, all of them joined": _card(input_shape=[3, 2048, 2048]),
    "images of a shape that is text": _card(input_shape="333"),
    "10⁵ classes and torchvision's largest net": _card(net="vit_h_14", input_shape=[3, 224, 224], classes=["a"] * 100_000),
    "a net of 2.6 GB in a file of 300 bytes": _card(net="regnet_y_128gf"),
    "groups of 10⁹ layers": _card(net="whitened", options={"depth": 10**9}),
    "a net option that is a class path": _card(options={"class_path": "os.system"}),
    "means that are not finite": _card(mean=[float("inf")] * 3),
    "deviations of zero": _card(std=[0, 0, 0]),
    "fewer means than channels": _card(mean=[0.5]),
    "class names that clear the screen": _card(classes=["\x1b[2J\x1b]0;gone\x07", "b"]),
    "class names that cannot be printed": _card(classes=["\ud800", "b"]),
    "weights as whole numbers": _dtypes("I32"),
    "weights that are not finite": _not_finite,
    "a pickle under its name": lambda sandbox: _renamed(sandbox, pickle.dumps(Gadget(os.mkdir, _trace(sandbox)))),
}


def _renamed(sandbox: Sandbox, content: bytes) -> Path:
    sandbox.model.write_bytes(content)
    return sandbox.model
