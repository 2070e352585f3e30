"""`model.safetensors`: the tested weights with the metadata needed to use them, without pickle and Lightning."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor, nn

from cifar_lit.base.errors import Failure, UsageError
from cifar_lit.base.files import atomic_write, display_path
from cifar_lit.base.trust import check_name
from cifar_lit.data.photos.decode import Preparation
from cifar_lit.models.registry import build_net, lay_out, with_versions
from cifar_lit.training.task import OneLabel, SeveralLabels, Task

MODEL = "model.safetensors"
FORMAT = "cifar-lit 1"
MAX_TEMPERATURE = 20.0  # the minimum is its inverse
BATCH, BATCH_PIXELS = 256, 1 << 20  # most images and pixels of a batch


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
    # Scores that 2 % and 20 % of new images should exceed (see `run.card`); None without held-out images.
    reject: list[float] | None = None
    temperature: float | None = None  # divisor of the logits for probabilities; None without held-out images
    temperature_source: str = ""  # source of the temperature, and the reason
    resize: str = "crop"  # how images with another aspect ratio are resized, one of `RESIZES`
    levels: list[int] | None = None  # values of 16-bit images that become black and white; None for 0 and 65535
    # With several labels an image, the probability from which it gets each of them.
    thresholds: list[float] | None = None
    # Scores of the true classes of held-out images for prediction sets, a list for each class, as `lac`.
    coverage: dict[str, list[list[float]]] | None = None

    @property
    def task(self) -> Task:
        """What a label is."""
        return OneLabel() if self.thresholds is None else SeveralLabels()

    @property
    def preparation(self) -> Preparation:
        """The format of the net's images."""
        channels, height, width = self.input_shape
        levels = None
        if self.levels is not None:
            levels = (self.levels[0], self.levels[1])
        return Preparation((height, width), channels, self.resize, levels)

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
        if images.dtype != torch.uint8 or list(images.shape[1:]) != self.card.input_shape:
            shape = " × ".join(map(str, self.card.input_shape))
            raise ValueError(f"images must be uint8 of (batch, {shape}), not {images.dtype} {tuple(images.shape)}")
        logits: Tensor = self.net((images.float() / 255 - self.mean) / self.std)
        return logits

    def on(self, device: torch.device | str) -> LoadedNet:
        """Move the net to a device, in evaluation mode and its memory format (half the time on a CPU)."""
        lay_out(self.net, self.card.net)
        return self.eval().to(device)

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
        return self.card.task.probabilities(logits)


def build_loaded_net(card: ModelCard, weights: Mapping[str, Tensor]) -> LoadedNet:
    """Return the net of a card with a copy of its weights (a state dict), in evaluation mode on the CPU."""
    net = build_net(card.net, **card.net_settings)
    net.load_state_dict(with_versions(net, weights))
    return LoadedNet(net, card).eval()


def save_weights(path: Path, weights: Mapping[str, Tensor], card: ModelCard) -> None:
    """Write a net's state dict with its card, atomically. Equal values give equal bytes."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    places, data = _parts(save(tensors))
    metadata = {"format": FORMAT, "card": json.dumps(asdict(card)), "sha256": sha256(data).hexdigest()}
    # safetensors itself writes the metadata in a random order.
    header = json.dumps({"__metadata__": metadata, **places}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # aligns the tensors to eight bytes
    with atomic_write(path) as partial, partial.open("wb") as file:
        file.writelines((len(header).to_bytes(8, "little"), header, data))


def _parts(content: bytes) -> tuple[dict[str, Any], memoryview]:
    """Return the header of a safetensors file, and the bytes of its tensors."""
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), memoryview(content)[end:]


def read_card(path: str | Path) -> ModelCard | None:
    """Return the card of a run folder or a `model.safetensors`, None for other files."""
    try:
        with safe_open(weights_file(path), framework="pt") as opened:
            metadata = opened.metadata() or {}
    except (UsageError, SafetensorError, OSError):
        return None
    if metadata.get("format") != FORMAT:
        return None
    return ModelCard(**json.loads(metadata["card"]))


def load_model_file(path: str | Path) -> LoadedNet:
    """Return the net of a run folder, or of a `model.safetensors`, in evaluation mode on the CPU.

    Raises:
        UsageError: there is no such file, it has another format, or it names a class that needs trust.
        Failure: the file is damaged.
    """
    file = weights_file(path)
    try:
        content = file.read_bytes()
        weights = load(content)
        header, data = _parts(content)
        metadata = header.get("__metadata__", {})
        digest = sha256(data).hexdigest()
        if metadata.get("sha256", digest) != digest:
            raise OSError("its checksum differs")
    except (OSError, SafetensorError) as error:
        raise Failure(f"{file} is damaged, or not a model.safetensors ({error}): copy or train it again") from None
    if metadata.get("format") != FORMAT:
        raise UsageError(f"{file} holds no {FORMAT!r} model: name a run folder, or its model.safetensors")
    card = ModelCard(**json.loads(metadata["card"]))
    check_name(card.net)
    return build_loaded_net(card, weights)


def weights_file(path: str | Path) -> Path:
    """Return the `model.safetensors` of a run folder, or the file itself; raise UsageError if there is none."""
    file = Path(path).expanduser()
    if file.is_dir():
        file = file / MODEL
    if not file.exists():
        raise UsageError(f"there is no {file}: name the folder of a finished run, or a model.safetensors")
    if file.suffix == ".ckpt":
        run = display_path(file.parent.parent)
        raise UsageError(f"{file} is a checkpoint: name the finished run {run} instead")
    return file
