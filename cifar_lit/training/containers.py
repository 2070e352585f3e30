"""What a checkpoint claims, looked at before and after it is read: the file may come from anywhere.

`torch.load(weights_only=True)` keeps code from running. It does not keep a small file from asking for much: a zip entry may
unpack to gigabytes, a tensor of one number may stand for 10¹² by its strides, a list that holds itself twice, thirty times
over, for 10⁹ values.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MOST_ENTRIES = 100_000  # of the zip file; one a tensor, and a few more
MOST_VALUES = 10_000_000  # with shared ones written out
DEEPEST = 50  # levels of lists and dicts


class FalseClaim(ValueError):
    """A checkpoint asks for more than it holds, or holds what no training wrote; the text says which, as half a sentence."""


def check_container(path: Path) -> None:
    """Raises FalseClaim for a zip file whose entries are packed: torch writes them as they are, so these would grow.

    Files that are no zip pass: they are told by whoever reads them. Raises OSError and zipfile.BadZipFile.
    """
    with path.open("rb") as opened:
        if opened.read(4) != b"PK\3\4":
            return
    with zipfile.ZipFile(path) as container:
        entries = container.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise FalseClaim("its parts are packed, which a checkpoint's are not")
    if len(entries) > MOST_ENTRIES or sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise FalseClaim("it claims to hold more than it does")


def check_contents(checkpoint: Mapping[str, Any]) -> None:
    """Raises FalseClaim for weights that are none, for values nested or shared without end, and for tensors without memory."""
    weights = checkpoint["state_dict"]
    named = isinstance(weights, Mapping) and all(isinstance(name, str) for name in weights)
    if not named or not all(isinstance(one, Tensor) for one in weights.values()):
        raise FalseClaim("its state_dict is not made of tensors by name")
    for name in ("epoch", "global_step"):
        if type(checkpoint.get(name, 0)) is not int or not 0 <= checkpoint.get(name, 0) < 2**53:
            raise FalseClaim(f"its {name} is not a number of steps or epochs")
    for name in ("hyper_parameters", "loops", "callbacks", "cifar_lit"):
        if not isinstance(checkpoint.get(name, {}), Mapping):
            raise FalseClaim(f"its {name} are not settings by name")
    _count(checkpoint, {}, 0)


def describe(settings: Any) -> str:
    """A net's name with the shapes that its weights depend on."""
    sides = settings.get("input_shape")  # a checkpoint's settings may be anything
    shape = "×".join(str(side)[:9] for side in sides[:3]) if isinstance(sides, list | tuple) else "of unknown shape"
    factor = settings.get("width", 1.0)
    width = "" if factor == 1.0 else f" width {factor:g}" if isinstance(factor, int | float) else " of unknown width"
    net, classes = (str(settings.get(name, "?"))[:60] for name in ("net", "num_classes"))
    return f"{'an unknown net' if net == '?' else net}{width} ({shape}, {classes} classes)"


def _count(value: Any, known: dict[int, int], depth: int) -> int:
    """The values in a nested value, shared ones as often as they are met."""
    if isinstance(value, Tensor):
        _check_tensor(value)
        return 1
    if not isinstance(value, Mapping | list | tuple | set | frozenset):
        return 1
    if depth > DEEPEST or known.get(id(value)) == 0:
        raise FalseClaim("its values are nested without end")
    if id(value) not in known:
        known[id(value)] = 0  # until it is counted: to meet it again means a loop
        inner = [one for pair in value.items() for one in pair] if isinstance(value, Mapping) else value
        known[id(value)] = 1 + sum(_count(one, known, depth + 1) for one in inner)
    if known[id(value)] > MOST_VALUES:
        raise FalseClaim(f"its values are shared so often that they are more than {MOST_VALUES:,}")
    return known[id(value)]


def _check_tensor(tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        raise FalseClaim("it has a tensor of a kind that no training wrote")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise FalseClaim(f"it has a tensor of {tensor.numel():,} numbers without the memory for them")
