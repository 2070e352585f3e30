"""`model.safetensors`: the tested weights with the metadata needed to use them, without pickle and Lightning."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeGuard, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from cifar_lit.data.formats import RESIZES
from cifar_lit.data.source_settings import MAX_SIDE
from cifar_lit.errors import Failure, InvalidFileError, UsageError, first_line
from cifar_lit.files import atomic_write, file_size
from cifar_lit.models.checks import build_on_meta_device
from cifar_lit.models.registry import MAX_WIDTH, build_net, net_spec, with_versions
from cifar_lit.models.spec import TIMM
from cifar_lit.plugins import UntrustedName, check_allowed, is_import_path
from cifar_lit.runs.run_folder import weights_file
from cifar_lit.text import MAX_NAME, is_name

FORMAT = "cifar-lit 1"
CHECKSUM = "sha256"  # key of the metadata
SETS = ("lac", "aps")  # kinds of prediction sets
BATCH, BATCH_PIXELS = 256, 1 << 20  # most images and pixels of a batch
READ_AT_ONCE = 2048  # images of a set that may be mapped from a file


@dataclass(frozen=True)
class ModelCard:
    """Metadata needed to use weights: the net and its settings, the classes, and the preparation of images."""

    net: str  # name in the registry
    width: float  # factor of the net's channels
    input_shape: list[int]  # channels, height, width
    classes: list[str]  # names in the order of the logits
    mean: list[float]  # per channel, for pixel values in 0 … 1
    std: list[float]
    options: dict[str, object] = field(default_factory=dict)  # the net's own settings, as plain values
    # Scores that 2 % and 20 % of new images should exceed (see `runs.card`); None without held-out images.
    reject: list[float] | None = None
    temperature: float | None = None  # divisor of the logits for probabilities; None without held-out images
    resize: str = "crop"  # how images with another aspect ratio are resized, one of `decode.RESIZES`
    levels: list[int] | None = None  # values of 16-bit images that become black and white; None for 0 and 65535
    # Scores of the true classes of held-out images by kind of prediction set, a list for each class (see `runs.card`).
    coverage: dict[str, list[list[float]]] | None = None

    @property
    def net_settings(self) -> dict[str, Any]:
        """Return the keyword arguments of `build_net`."""
        channels, height, width = self.input_shape
        sizes = {"channels": channels, "image_size": (height, width), "num_classes": len(self.classes)}
        return {**sizes, "width": self.width, "options": self.options}


def batch_size_of(images: Tensor) -> int:
    """Return the batch size for images (B, C, H, W), B > 0."""
    return max(1, min(BATCH, BATCH_PIXELS // images[0, 0].numel()))


class LoadedNet(nn.Module):
    """A trained net with its normalisation: from uint8 images (B, C, H, W) to float32 logits (B, classes).

    `net` is the bare net, for normalised images.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, net: nn.Module, card: ModelCard) -> None:
        super().__init__()
        self.net, self.card, self.classes = net, card, tuple(card.classes)
        self.register_buffer("mean", torch.tensor(card.mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(card.std).view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of uint8 images; raise ValueError for another dtype or shape."""
        if images.dtype != torch.uint8 or images.ndim != 4 or list(images.shape[1:]) != self.card.input_shape:
            shape = " × ".join(map(str, self.card.input_shape))
            raise ValueError(f"images must be uint8 of (batch, {shape}), not {images.dtype} {tuple(images.shape)}")
        logits: Tensor = self.net((images.float() / 255 - self.mean) / self.std)
        return logits

    def on(self, device: torch.device | str) -> LoadedNet:
        """Move the net to a device, in evaluation mode and channels_last format (half the time on a CPU)."""
        return self.eval().to(device).to(memory_format=torch.channels_last)

    def logits(self, images: Tensor) -> Tensor:
        """Return float32 logits (B, classes), on the CPU, for any number B > 0 of uint8 images (B, C, H, W)."""
        with torch.no_grad():
            logits = [self(batch.to(self.mean.device)) for batch in images.split(batch_size_of(images))]
        return torch.cat(logits).float().cpu()

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return calibrated probabilities of logits, float32 (B, classes)."""
        logits = logits.float()
        if self.card.temperature is not None:
            logits = logits / self.card.temperature
        return logits.softmax(1)


def build_loaded_net(card: ModelCard, weights: Mapping[str, Tensor]) -> LoadedNet:
    """Return the net of a card with a copy of its weights (a state dict), in evaluation mode on the CPU."""
    net = build_net(card.net, **card.net_settings)
    net.load_state_dict(with_versions(net, weights))
    return LoadedNet(net, card).eval()


def save_weights(path: Path, weights: Mapping[str, Tensor], card: ModelCard) -> None:
    """Write a net's state dict with its card, atomically. Equal values give equal bytes."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    text = json.dumps(asdict(card))
    metadata = {"format": FORMAT, "card": text, CHECKSUM: checksum(text, tensors)}
    content = save(tensors)
    # safetensors itself writes the metadata in a random order.
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps({"__metadata__": metadata, **json.loads(content[8:end])}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # aligns the tensors to eight bytes
    with atomic_write(path) as partial, partial.open("wb") as file:
        file.writelines((len(header).to_bytes(8, "little"), header, memoryview(content)[end:]))


def checksum(card: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256, in hex, of a card's text and of all tensors with their names, dtypes and shapes."""
    digest = sha256(card.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\0{name} {tensor.dtype} {list(tensor.shape)}\0".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def read_card(path: str | Path) -> ModelCard | None:
    """Return the card of a run folder or a `model.safetensors`, None for other or invalid files."""
    with suppress(UsageError, InvalidFileError, SafetensorError, OSError, KeyError, MemoryError):
        with safe_open(weights_file(path), framework="pt") as opened:
            metadata = opened.metadata() or {}
        if metadata.get("format") == FORMAT:
            return ModelCard(**card_values(metadata["card"]))
    return None


def load_model_file(path: str | Path) -> LoadedNet:
    """Return the net of a run folder, or of a `model.safetensors`, in evaluation mode on the CPU.

    Raises:
        UsageError: there is no such file, or it has another format.
        Failure: the file is damaged, or was not written by this program.
    """
    file = weights_file(path)
    try:
        size = file_size(file)
        with file.open("rb") as opened:
            length, brace = int.from_bytes(opened.read(8), "little"), opened.read(1)
        if brace not in (b"", b"{"):
            raise UsageError(f"{file} is not a model.safetensors: name a run folder, or its model.safetensors")
        if length > min(MAX_HEADER, max(size - 8, 0)):
            raise InvalidFileError(f"its header claims {length:,} bytes")
        with safe_open(file, framework="pt") as opened:
            metadata: dict[str, str] = opened.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise InvalidFileError(f"it holds no {FORMAT!r} model")
            card = ModelCard(**card_values(metadata["card"]))
            check_allowed(card.net)
            if card.net.startswith(TIMM) or is_import_path(card.net):
                net_spec(card.net)  # raises UsageError for a missing package: the file is not damaged
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118, no dict
            check_tensors({name: (one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}, card)
            weights = {name: opened.get_tensor(name) for name in slices}
        if metadata.get(CHECKSUM) != checksum(metadata["card"], weights):
            raise InvalidFileError("its checksum differs: the file was changed")
        net = build_loaded_net(card, weights)
        for tensor in net.state_dict().values():
            if not tensor.isfinite().all():
                raise InvalidFileError("its weights are not finite numbers: the training diverged")
    except Failure:
        raise
    except (KeyError, TypeError):  # the card has missing or additional values
        raise Failure(f"{file} does not say how to build its net: copy or train it again") from None
    except OSError as error:
        raise Failure(f"{file} cannot be read ({error.strerror or error}): copy or train it again") from None
    except MemoryError:  # safetensors maps the whole file, which may be sparse
        raise Failure(f"{file} is larger than the memory: copy or train it again") from None
    except (InvalidFileError, SafetensorError, RuntimeError) as error:  # RuntimeError: torch cannot map the file
        raise Failure(f"{file} is damaged or invalid ({error}): copy or train it again") from None
    return net


# ---- Validation of untrusted files before memory is allocated.

MAX_CARD = 3 << 20  # bytes
MAX_HEADER = 4 << 20  # bytes; torchvision's net with the most tensors and 20,000 classes needs less than 1 MiB
MAX_CHANNELS = 64
MAX_CLASSES = 100_000
MAX_TEMPERATURE = 20.0  # the minimum is its inverse

_FLOATS = {"F16", "BF16", "F32", "F64"}
_EXACT = {
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def card_values(text: str) -> dict[str, Any]:
    """Return the values of a model card from its JSON; raise InvalidFileError for invalid ones."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if isinstance(values, dict):
        for name in ("levels", "coverage"):  # not in files of earlier versions
            values.setdefault(name, None)
    if not isinstance(values, dict) or values.keys() != _CHECKS.keys():
        raise InvalidFileError("its card does not say how to build its net")
    for name, check in _CHECKS.items():
        if not check(values[name]):
            raise InvalidFileError(f"its {name} cannot be {json.dumps(values[name])[:60]}")
    channels = values["input_shape"][0]
    for name in ("mean", "std"):
        if len(values[name]) != channels:
            raise InvalidFileError(f"its {name} has {len(values[name])} values for {channels} channels")
    for scores in (values["coverage"] or {}).values():
        if len(scores) != len(values["classes"]):
            raise InvalidFileError(f"its coverage has {len(scores)} lists for {len(values['classes'])} classes")
    return values


def check_card(card: ModelCard) -> None:
    """Raise UsageError for a card that `load_model_file` would refuse. Call this before the training."""
    try:
        text = json.dumps(asdict(card))
        card_values(text)
        if len(json.dumps(text)) > MAX_CARD:
            raise InvalidFileError("the names of all classes together are too long")
    except (InvalidFileError, TypeError) as error:  # TypeError: an option is not a plain value
        raise UsageError(f"the trained net could not be loaded again ({error}): choose other settings") from None


def check_tensors(claims: Mapping[str, tuple[str, tuple[int, ...]]], card: ModelCard) -> None:
    """Raise InvalidFileError unless the tensors in a file's header are those of the card's net.

    The net is built on the meta device, without memory for its weights. claims: dtype in the notation of safetensors
    ("F32") and shape of each tensor, by name.
    """
    try:
        expected = build_on_meta_device(card.net, **card.net_settings).state_dict()
    except UntrustedName:
        raise
    except (ValueError, TypeError, RuntimeError, ArithmeticError, MemoryError) as error:  # meaningless settings
        raise InvalidFileError(f"its net cannot be built: {first_line(error)[:200]}") from None
    if claims.keys() != expected.keys():
        raise InvalidFileError(f"its weights do not fit its net {card.net}")
    for name, tensor in expected.items():
        if not _fits(tensor, *claims[name]):
            raise InvalidFileError(f"its weights do not fit its net {card.net}")


def _fits(tensor: Tensor, dtype: str, shape: tuple[int, ...]) -> bool:
    if tuple(tensor.shape) != shape:
        return False
    if tensor.is_floating_point():
        return dtype in _FLOATS
    return _EXACT.get(tensor.dtype) == dtype


def _is_number(value: object) -> bool:
    # False for NaN and huge integers, and for bool.
    return type(value) in (int, float) and abs(cast("float", value)) <= sys.float_info.max


def _are_numbers(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


def _are_integers(value: object, count: int) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) == count and all(type(each) is int for each in value)


def _is_shape(value: object) -> bool:
    return _are_integers(value, 3) and min(value) > 0 and value[0] <= MAX_CHANNELS and max(value[1:]) <= MAX_SIDE


def _are_levels(value: object) -> bool:
    return _are_integers(value, 2) and -(1 << 31) <= value[0] < value[1] < 1 << 31


def _are_scores(value: object) -> bool:
    if not isinstance(value, dict) or value.keys() != {*SETS}:
        return False
    return all(isinstance(scores, list) and all(map(_are_numbers, scores)) for scores in value.values())


def _is_plain(value: object, depth: int = 0) -> bool:
    """Return whether a setting is None, a bool, a finite number, a short text, or a short list or object of these."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return depth < 3 and len(value) <= 1000 and all(_is_plain(each, depth + 1) for each in value)
    if isinstance(value, str):
        return len(value) <= MAX_NAME
    return value is None or isinstance(value, bool) or _is_number(value)


_CHECKS = {
    "net": is_name,
    "width": lambda value: _is_number(value) and 0 < value <= MAX_WIDTH,
    "input_shape": _is_shape,
    "classes": lambda value: isinstance(value, list) and 0 < len(value) <= MAX_CLASSES and all(map(is_name, value)),
    "mean": _are_numbers,
    "std": lambda value: _are_numbers(value) and min(value, default=0) > 0,
    "options": lambda value: isinstance(value, dict) and _is_plain(value),
    "reject": lambda value: value is None or (_are_numbers(value) and len(value) == 2 and value[0] >= value[1]),
    "temperature": lambda value: (
        value is None or (_is_number(value) and 1 / MAX_TEMPERATURE <= value <= MAX_TEMPERATURE)
    ),
    "resize": lambda value: value in tuple(RESIZES),
    "levels": lambda value: value is None or _are_levels(value),
    "coverage": lambda value: value is None or _are_scores(value),
}
