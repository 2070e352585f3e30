"""`model.safetensors`: the tested weights with all that a use of them needs, without pickle and without Lightning."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from cifar_lit.disk import written_whole
from cifar_lit.errors import Failure
from cifar_lit.models.table import build_net
from cifar_lit.results.claims import FalseClaim, card_values, check_finite, check_header_length, check_tensors
from cifar_lit.results.run_folder import weights_file

FORMAT = "cifar-lit 1"
CHECKSUM = "sha256"  # of the metadata; files of before there were checksums have none
NOVELTY = "novelty."  # begins the names of tensors that are not the net's, see `cifar_lit.use.novelty`


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
        with written_whole(path) as partial:
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


def load(path: str | Path) -> LoadedNet:
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
                raise FalseClaim("it is not as it was written: its checksum differs")
        novelty = {name.removeprefix(NOVELTY): weights.pop(name) for name in list(weights) if name.startswith(NOVELTY)}
        net = build_net(card.net, **settings)
        net.load_state_dict(weights)
        check_finite(net)
    except (KeyError, TypeError):  # what a card without its values, or with others, leads to
        raise Failure(f"{file} does not say how to build its net: copy or train it again") from None
    except FalseClaim as error:
        raise Failure(f"{file} is damaged or false ({error}): copy or train it again") from None
    except (SafetensorError, OSError, RuntimeError) as error:  # of torch, where it maps the file
        raise Failure(f"{file} is damaged ({error}): copy or train it again") from None
    return LoadedNet(net, card, novelty).eval()
