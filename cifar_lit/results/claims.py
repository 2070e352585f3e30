"""What a `model.safetensors` says of itself, looked at before memory is spent on it: the file may come from anywhere."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cifar_lit.errors import first_line
from cifar_lit.models.unfilled import build_unfilled

LARGEST_HEADER = 4 << 20  # bytes; that of torchvision's net with the most tensors, and of 20,000 classes, is below 1 MiB
LARGEST_SIDE = 2048  # pixels of the images that a net takes; these are nets for small images
LARGEST_WIDTH = 1000.0  # times the hidden widths
MOST_CLASSES = 100_000
LONGEST_NAME = 300  # characters of a class or a net
LARGEST_EXTRA = 1 << 28  # bytes of all tensors that are not the net's

_FLOATS = {"F16", "BF16", "F32", "F64"}
_EXACT = {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}

Claim = tuple[str, tuple[int, ...]]  # a tensor's dtype as safetensors writes it ("F32"), and its shape


class FalseClaim(ValueError):
    """A file claims what cannot be so, or more than a model of this program needs; the text is half a sentence."""


def check_header_length(file: Path) -> None:
    """Raises FalseClaim when the first eight bytes claim a header that is longer than the file, or than any of ours."""
    with file.open("rb") as opened:
        claimed = int.from_bytes(opened.read(8), "little")
    if claimed > min(LARGEST_HEADER, max(file.stat().st_size - 8, 0)):
        raise FalseClaim(f"its header claims {claimed:,} bytes")


def card_values(text: str) -> dict[str, Any]:
    """The values of a model card from its JSON; raises FalseClaim for those that no net of ours can have.

    Which values there must be is left to the card itself; what is not known here passes.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise FalseClaim("its card does not say how to build its net") from None
    if not isinstance(found, dict):
        raise FalseClaim("its card does not say how to build its net")
    for name, check in _CHECKS.items():
        if name in found and not check(found[name]):
            raise FalseClaim(f"its {name} cannot be {_shortly(found[name])}")
    if "input_shape" in found:
        for name in ("mean", "std"):
            if name in found and len(found[name]) != found["input_shape"][0]:
                raise FalseClaim(f"its {name} has {len(found[name])} values for {found['input_shape'][0]} channels")
    return found


def check_tensors(claims: Mapping[str, Claim], name: str, further: str, **settings: Any) -> None:
    """Raises FalseClaim unless `claims` are those of the net `name`, which is not given memory.

    further: how the names of tensors begin that may lie beside the net's. settings: of `build_net`. An impossible setting
    raises FalseClaim too.
    """
    try:
        net = build_unfilled(name, **settings)
    except (ValueError, TypeError, RuntimeError, ArithmeticError, MemoryError) as error:  # what settings without sense lead to
        raise FalseClaim(f"its net cannot be built: {first_line(error)[:200]}") from None
    wanted = net.state_dict()
    for key, tensor in wanted.items():
        if key not in claims or not _fits(tensor, claims[key]):
            raise FalseClaim(f"its weights are not those of the net {name} that it names")
    extra = {key: claim for key, claim in claims.items() if key not in wanted}
    strange = [key for key in extra if not (further and key.startswith(further))]
    if strange:
        raise FalseClaim(f"its weights are not those of the net {name} that it names")
    if sum(_BYTES.get(dtype, 1) * math.prod(shape) for dtype, shape in extra.values()) > LARGEST_EXTRA:
        raise FalseClaim(f"beside the net it has more than {LARGEST_EXTRA >> 20} MiB")


def check_finite(net: nn.Module) -> None:
    """Raises FalseClaim when a weight is not finite: every answer of the net would be nonsense."""
    if not all(bool(tensor.isfinite().all()) for tensor in net.state_dict().values() if tensor.is_floating_point()):
        raise FalseClaim("its weights are not finite numbers: the training diverged")


def printable(text: str) -> bool:
    """Whether a text has no control characters, which a terminal would obey, nor halves of pairs, which it cannot print."""
    return not any(unicodedata.category(character) in ("Cc", "Cs") for character in text)


def _fits(tensor: Tensor, claim: Claim) -> bool:
    dtype, shape = claim
    right = dtype in _FLOATS if tensor.is_floating_point() else _EXACT.get(tensor.dtype) == dtype
    return right and tuple(tensor.shape) == tuple(shape)


def _number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def _name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= LONGEST_NAME and printable(value)


def _sides(value: Any) -> bool:
    whole = isinstance(value, list) and len(value) == 3 and all(type(side) is int and side > 0 for side in value)
    return whole and value[0] <= 64 and max(value[1:]) <= LARGEST_SIDE


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_number, value))


def _plain(value: Any, depth: int = 0) -> bool:
    """Whether a setting is a finite number, a short text, a truth value, none, or a short list or object of them."""
    if isinstance(value, list | dict):
        inner = list(value.values()) if isinstance(value, dict) else value
        return depth < 3 and len(inner) <= 1000 and all(_plain(one, depth + 1) for one in inner)
    return value is None or isinstance(value, bool) or _number(value) or (isinstance(value, str) and len(value) <= LONGEST_NAME)


_CHECKS = {
    "net": _name,
    "width": lambda value: _number(value) and 0 < value <= LARGEST_WIDTH,
    "input_shape": _sides,
    "classes": lambda value: isinstance(value, list) and 0 < len(value) <= MOST_CLASSES and all(map(_name, value)),
    "mean": _numbers,
    "std": lambda value: _numbers(value) and min(value, default=0) > 0,
    "options": lambda value: isinstance(value, dict) and _plain(value),
}


def _shortly(value: Any) -> str:
    text = json.dumps(value)[:60]
    return text if len(text) < 60 else f"{text}…"
