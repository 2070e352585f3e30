"""`model.safetensors`: the tested weights with all that a use of them needs, without pickle and without Lightning."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from cifar_lit.errors import Failure, first_line
from cifar_lit.files import atomic_write
from cifar_lit.models.registry import build_net, build_on_meta_device
from cifar_lit.runs.run_folder import weights_file

# ---- What a `model.safetensors` says of itself, looked at before memory is spent on it: the file may come from anywhere.

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


class InvalidModelError(ValueError):
    """A file claims what cannot be so, or more than a model of this program needs; the text is half a sentence."""


def check_header_length(file: Path) -> None:
    """Raises InvalidModelError when the first eight bytes claim a header that is longer than the file, or than any of ours."""
    with file.open("rb") as opened:
        claimed = int.from_bytes(opened.read(8), "little")
    if claimed > min(LARGEST_HEADER, max(file.stat().st_size - 8, 0)):
        raise InvalidModelError(f"its header claims {claimed:,} bytes")


def card_values(text: str) -> dict[str, Any]:
    """The values of a model card from its JSON; raises InvalidModelError for those that no net of ours can have.

    Which values there must be is left to the card itself; what is not known here passes.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidModelError("its card does not say how to build its net") from None
    if not isinstance(found, dict):
        raise InvalidModelError("its card does not say how to build its net")
    for name, check in _CHECKS.items():
        if name in found and not check(found[name]):
            raise InvalidModelError(f"its {name} cannot be {_shortly(found[name])}")
    if "input_shape" in found:
        for name in ("mean", "std"):
            if name in found and len(found[name]) != found["input_shape"][0]:
                raise InvalidModelError(f"its {name} has {len(found[name])} values for {found['input_shape'][0]} channels")
    return found


def check_tensors(claims: Mapping[str, Claim], name: str, further: str, **settings: Any) -> None:
    """Raises InvalidModelError unless `claims` are those of the net `name`, which is not given memory.

    further: how the names of tensors begin that may lie beside the net's. settings: of `build_net`. An impossible setting
    raises InvalidModelError too.
    """
    try:
        net = build_on_meta_device(name, **settings)
    except (ValueError, TypeError, RuntimeError, ArithmeticError, MemoryError) as error:  # what settings without sense lead to
        raise InvalidModelError(f"its net cannot be built: {first_line(error)[:200]}") from None
    wanted = net.state_dict()
    for key, tensor in wanted.items():
        if key not in claims or not _fits(tensor, claims[key]):
            raise InvalidModelError(f"its weights are not those of the net {name} that it names")
    extra = {key: claim for key, claim in claims.items() if key not in wanted}
    strange = [key for key in extra if not (further and key.startswith(further))]
    if strange:
        raise InvalidModelError(f"its weights are not those of the net {name} that it names")
    if sum(_BYTES.get(dtype, 1) * math.prod(shape) for dtype, shape in extra.values()) > LARGEST_EXTRA:
        raise InvalidModelError(f"beside the net it has more than {LARGEST_EXTRA >> 20} MiB")


def check_finite(net: nn.Module) -> None:
    """Raises InvalidModelError when a weight is not finite: every answer of the net would be nonsense."""
    if not all(bool(tensor.isfinite().all()) for tensor in net.state_dict().values() if tensor.is_floating_point()):
        raise InvalidModelError("its weights are not finite numbers: the training diverged")


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


FORMAT = "cifar-lit 1"
CHECKSUM = "sha256"  # of the metadata; files of before there were checksums have none
NOVELTY = "novelty."  # begins the names of tensors that are not the net's, see `cifar_lit.inference.novelty`


@dataclass(frozen=True)
class ModelCard:
    """What must be known to use weights: the net and its settings, the classes, and how images are prepared.

    input_shape: channels, height, width. mean, std: of the channels, in [0, 1] units. options: the net's own, as plain values.
    novelty: how images unlike those of the training are told, with the threshold; empty where they are not. Files of before
    nets had options, or novelty was told, have none.
    """

    net: str
    width: float
    input_shape: list[int]
    classes: list[str]
    mean: list[float]
    std: list[float]
    options: dict[str, Any] = field(default_factory=dict)
    novelty: dict[str, Any] = field(default_factory=dict)


class LoadedNet(nn.Module):
    """A trained net that takes images as they are: uint8 (B, C, H, W) to logits float32 (B, classes).

    `net` is the bare net, for images that are normalised already; `card` and `classes` say what it was trained for. `novelty`
    has the tensors that `card.novelty` goes with, which are none of the net's weights; empty where there are none.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, net: nn.Module, card: ModelCard, novelty: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self.net, self.card, self.classes = net, card, tuple(card.classes)
        self.novelty = dict(novelty or {})
        self.register_buffer("mean", torch.tensor(card.mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(card.std).view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Logits of uint8 images; raises ValueError for another dtype or shape."""
        if images.dtype != torch.uint8 or images.ndim != 4 or list(images.shape[1:]) != self.card.input_shape:
            shape = " × ".join(map(str, self.card.input_shape))
            raise ValueError(f"images must be uint8 of (batch, {shape}), not {images.dtype} {tuple(images.shape)}")
        logits: Tensor = self.net((images.float() / 255 - self.mean) / self.std)
        return logits


def save_weights(path: Path, weights: Mapping[str, Tensor], card: ModelCard, novelty: Mapping[str, Tensor] | None = None) -> None:
    """Writes a net's state dict with its card, as a whole or not at all; raises Failure when the disk does not take it.

    novelty: the tensors that go with `card.novelty`.
    """
    named = {**weights, **{NOVELTY + name: tensor for name, tensor in (novelty or {}).items()}}
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
    try:
        with atomic_write(path) as partial:
            text = json.dumps(asdict(card))
            save_file(plain, partial, metadata={"format": FORMAT, "card": text, CHECKSUM: checksum(text, plain)})
    except (SafetensorError, OSError) as error:  # safetensors has an error of its own for a full disk
        raise Failure(f"cannot write {path}: {error}. Free some space; the checkpoints are intact.") from None


def checksum(card: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256, as hexadecimal text, of a card's text and of all tensors with their names, dtypes and shapes."""
    digest = sha256(card.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\0{name} {tensor.dtype} {list(tensor.shape)}\0".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def loaded_net(card: ModelCard, weights: Mapping[str, Tensor], novelty: Mapping[str, Tensor] | None = None) -> LoadedNet:
    """The net of a card with its weights, in float32 on the CPU, in evaluation mode; see `LoadedNet`.

    Raises what `build_net` and `load_state_dict` raise where the two do not fit.
    """
    channels, height, width = card.input_shape
    size, classes = (height, width), len(card.classes)
    net = build_net(card.net, channels=channels, image_size=size, num_classes=classes, width=card.width, options=card.options)
    net.load_state_dict(weights)
    return LoadedNet(net, card, novelty).eval()


def load_model_file(path: str | Path) -> LoadedNet:
    """Builds the net of a run folder, or of its `model.safetensors`, in evaluation mode on the CPU.

    Raises UsageError when there is no such file, Failure when it is damaged or was not written by this program.
    """
    file = weights_file(path)
    try:
        check_header_length(file)
        with safe_open(file, framework="pt") as opened:
            metadata: dict[str, Any] = opened.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise Failure(f"{file} holds no {FORMAT!r} model: its metadata do not say how to build the net")
            card = ModelCard(**card_values(metadata["card"]))
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
            claims = {name: (one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}
            channels, height, width = card.input_shape
            settings: dict[str, Any] = {
                "channels": channels,
                "image_size": (height, width),
                "num_classes": len(card.classes),
                "width": card.width,
                "options": card.options,
            }
            check_tensors(claims, card.net, NOVELTY, **settings)
            weights = {name: opened.get_tensor(name) for name in claims}
            if metadata.get(CHECKSUM, (found := checksum(metadata["card"], weights))) != found:
                raise InvalidModelError("it is not as it was written: its checksum differs")
        novelty = {name.removeprefix(NOVELTY): weights.pop(name) for name in list(weights) if name.startswith(NOVELTY)}
        net = build_net(card.net, **settings)
        net.load_state_dict(weights)
        check_finite(net)
    except (KeyError, TypeError):  # what a card without its values, or with others, leads to
        raise Failure(f"{file} does not say how to build its net: copy or train it again") from None
    except InvalidModelError as error:
        raise Failure(f"{file} is damaged or false ({error}): copy or train it again") from None
    except (SafetensorError, OSError, RuntimeError) as error:  # of torch, where it maps the file
        raise Failure(f"{file} is damaged ({error}): copy or train it again") from None
    return LoadedNet(net, card, novelty).eval()
