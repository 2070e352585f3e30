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
from safetensors.torch import save
from torch import Tensor, nn

from cifar_lit.errors import Failure, InvalidFileError, first_line
from cifar_lit.files import atomic_write
from cifar_lit.models.registry import build_net, build_on_meta_device
from cifar_lit.runs.run_folder import weights_file

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

    @property
    def net_settings(self) -> dict[str, Any]:
        """What `build_net` takes besides the net's name."""
        channels, height, width = self.input_shape
        sizes = {"channels": channels, "image_size": (height, width), "num_classes": len(self.classes)}
        return {**sizes, "width": self.width, "options": self.options}


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


def build_loaded_net(card: ModelCard, weights: Mapping[str, Tensor], novelty: Mapping[str, Tensor] | None = None) -> LoadedNet:
    """The net of a card with a copy of its weights (a state dict), in evaluation mode on the CPU, as its file is loaded."""
    net = build_net(card.net, **card.net_settings)
    net.load_state_dict(dict(weights))
    return LoadedNet(net, card, novelty).eval()


def save_weights(path: Path, weights: Mapping[str, Tensor], card: ModelCard, novelty: Mapping[str, Tensor] | None = None) -> None:
    """Writes a net's state dict with its card, as a whole or not at all; the same values give the same bytes.

    Args:
        novelty: The tensors that go with `card.novelty`.

    Raises:
        Failure: The disk does not take it.
    """
    named = {**weights, **{NOVELTY + name: tensor for name, tensor in (novelty or {}).items()}}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
    text = json.dumps(asdict(card))
    metadata = {"format": FORMAT, "card": text, CHECKSUM: checksum(text, tensors)}
    content = save(tensors)
    # The metadata are put into the header here, as safetensors writes them in another order each time.
    length = int.from_bytes(content[:8], "little")
    header = json.dumps({"__metadata__": metadata, **json.loads(content[8 : 8 + length])}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # the tensors begin at a multiple of eight bytes
    try:
        with atomic_write(path) as partial, partial.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.write(memoryview(content)[8 + length :])
    except OSError as error:
        raise Failure(f"cannot write {path}: {error}. Free some space; the checkpoints are intact.") from None


def checksum(card: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256, as hexadecimal text, of a card's text and of all tensors with their names, dtypes and shapes."""
    digest = sha256(card.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\0{name} {tensor.dtype} {list(tensor.shape)}\0".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def load_model_file(path: str | Path) -> LoadedNet:
    """Builds the net of a run folder, or of its `model.safetensors`, in evaluation mode on the CPU.

    Raises:
        UsageError: There is no such file.
        Failure: It is damaged or was not written by this program.
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
            check_tensors(claims, card)
            weights = {name: opened.get_tensor(name) for name in claims}
        if CHECKSUM in metadata and metadata[CHECKSUM] != checksum(metadata["card"], weights):
            raise InvalidFileError("it is not as it was written: its checksum differs")
        novelty = {name.removeprefix(NOVELTY): weights.pop(name) for name in list(weights) if name.startswith(NOVELTY)}
        net = build_loaded_net(card, weights, novelty)
        check_finite(net)
    except (KeyError, TypeError):  # what a card without its values, or with others, leads to
        raise Failure(f"{file} does not say how to build its net: copy or train it again") from None
    except InvalidFileError as error:
        raise Failure(f"{file} is damaged or false ({error}): copy or train it again") from None
    except (SafetensorError, OSError, RuntimeError) as error:  # of torch, where it maps the file
        raise Failure(f"{file} is damaged ({error}): copy or train it again") from None
    return net


# ---- What a file says of itself, looked at before memory is spent on it: it may come from anywhere.

MAX_HEADER = 4 << 20  # bytes; that of torchvision's net with the most tensors, and of 20,000 classes, is below 1 MiB
MAX_SIDE = 2048  # pixels of the images that a net takes; these are nets for small images
MAX_CHANNELS = 64
MAX_WIDTH = 1000.0  # times the hidden widths
MAX_CLASSES = 100_000
MAX_NAME = 300  # characters of a class or a net
MAX_EXTRA = 1 << 28  # bytes of all tensors that are not the net's

_FLOATS = {"F16", "BF16", "F32", "F64"}
_EXACT = {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}

Claim = tuple[str, tuple[int, ...]]  # a tensor's dtype as safetensors writes it ("F32"), and its shape


def check_header_length(file: Path) -> None:
    """Raises InvalidFileError when the first eight bytes claim a header that is longer than the file, or than any of ours."""
    with file.open("rb") as opened:
        claimed = int.from_bytes(opened.read(8), "little")
    if claimed > min(MAX_HEADER, max(file.stat().st_size - 8, 0)):
        raise InvalidFileError(f"its header claims {claimed:,} bytes")


def card_values(text: str) -> dict[str, Any]:
    """The values of a model card from its JSON; raises InvalidFileError for those that no net of ours can have.

    Which values there must be is left to the card itself; what is not known here passes.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise InvalidFileError("its card does not say how to build its net")
    for name, check in _CHECKS.items():
        if name in values and not check(values[name]):
            raise InvalidFileError(f"its {name} cannot be {_shortly(values[name])}")
    for name in ("mean", "std"):
        if "input_shape" in values and name in values and len(values[name]) != values["input_shape"][0]:
            raise InvalidFileError(f"its {name} has {len(values[name])} values for {values['input_shape'][0]} channels")
    return values


def check_tensors(claims: Mapping[str, Claim], card: ModelCard) -> None:
    """Raises InvalidFileError unless `claims` are those of the card's net, or of novelty; the net is not given memory."""
    try:
        expected = build_on_meta_device(card.net, **card.net_settings).state_dict()
    except (ValueError, TypeError, RuntimeError, ArithmeticError, MemoryError) as error:  # what settings without sense lead to
        raise InvalidFileError(f"its net cannot be built: {first_line(error)[:200]}") from None
    extra = {name: claim for name, claim in claims.items() if name not in expected}
    fitting = all(name in claims and _fits(tensor, claims[name]) for name, tensor in expected.items())
    if not fitting or not all(name.startswith(NOVELTY) for name in extra):
        raise InvalidFileError(f"its weights are not those of the net {card.net} that it names")
    if sum(_BYTES.get(dtype, 1) * math.prod(shape) for dtype, shape in extra.values()) > MAX_EXTRA:
        raise InvalidFileError(f"beside the net it has more than {MAX_EXTRA >> 20} MiB")


def check_finite(net: nn.Module) -> None:
    """Raises InvalidFileError when a weight is not finite: every answer of the net would be nonsense."""
    if not all(bool(tensor.isfinite().all()) for tensor in net.state_dict().values() if tensor.is_floating_point()):
        raise InvalidFileError("its weights are not finite numbers: the training diverged")


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
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME and printable(value)


def _sides(value: Any) -> bool:
    whole = isinstance(value, list) and len(value) == 3 and all(type(side) is int and side > 0 for side in value)
    return whole and value[0] <= MAX_CHANNELS and max(value[1:]) <= MAX_SIDE


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_number, value))


def _plain(value: Any, depth: int = 0) -> bool:
    """Whether a setting is a finite number, a short text, a truth value, none, or a short list or object of them."""
    if isinstance(value, list | dict):
        inner = list(value.values()) if isinstance(value, dict) else value
        return depth < 3 and len(inner) <= 1000 and all(_plain(one, depth + 1) for one in inner)
    return value is None or isinstance(value, bool) or _number(value) or (isinstance(value, str) and len(value) <= MAX_NAME)


_CHECKS = {
    "net": _name,
    "width": lambda value: _number(value) and 0 < value <= MAX_WIDTH,
    "input_shape": _sides,
    "classes": lambda value: isinstance(value, list) and 0 < len(value) <= MAX_CLASSES and all(map(_name, value)),
    "mean": _numbers,
    "std": lambda value: _numbers(value) and min(value, default=0) > 0,
    "options": lambda value: isinstance(value, dict) and _plain(value),
}


def _shortly(value: Any) -> str:
    text = json.dumps(value)[:60]
    return text if len(text) < 60 else f"{text}…"
