"""`Classifier`: a trained net that takes images as one has them and answers with class names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cifar_lit.data.decode import decode, pixels_of
from cifar_lit.errors import Failure
from cifar_lit.inference.novelty import novelty
from cifar_lit.models.embedding import logits_and_embeddings
from cifar_lit.runs import model_file as weights
from cifar_lit.runs.model_file import LoadedNet

BATCH = 256  # images that are computed at once


@dataclass(frozen=True)
class Prediction:
    """What a net makes of one image.

    label: the class with the highest probability. probability: its, in 0 … 1. top: the likeliest classes with their
    probabilities, the best first. novelty: how far the image is from those of the training, 0 … 2. unlike: whether that is
    further than 95 % of images that were held out then. Both are None where the weights do not say how to tell.
    """

    label: str
    probability: float
    top: tuple[tuple[str, float], ...]
    novelty: float | None = None
    unlike: bool | None = None


class Classifier:
    """A trained net with its classes.

    net: from uint8 images (B, C, H, W) to float32 logits (B, classes). classes: their names, in the order of the logits.
    card: what the net was trained for: its name and settings, image size, mean and std.
    """

    def __init__(self, net: LoadedNet, device: str = "cpu") -> None:
        self.net = net.eval().to(device).to(memory_format=torch.channels_last)  # half the time on a CPU
        self.card, self.classes = net.card, net.classes

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.card.input_shape))
        return f"Classifier({self.card.net}, {shape}, {len(self.classes)} classes: {', '.join(self.classes[:10])})"

    @property
    def size(self) -> tuple[int, int]:
        """(H, W) of the images that the net takes."""
        return self.card.input_shape[1], self.card.input_shape[2]

    @property
    def channels(self) -> int:
        """3 for RGB, 1 for grey."""
        return self.card.input_shape[0]

    @property
    def tells_novelty(self) -> bool:
        """Whether the weights say how to tell images that are unlike those of the training."""
        return bool(self.net.novelty and self.card.novelty)

    def __call__(self, images: Tensor) -> Tensor:
        """float32 logits (B, classes), on the CPU, of uint8 images (B, C, H, W) of the net's size."""
        return self.look(images)[0]

    def look(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """float32 logits (B, classes) and embeddings (B, features), on the CPU, of uint8 images (B, C, H, W)."""
        device = self.net.mean.device
        parts = [logits_and_embeddings(self.net, part.to(device)) for part in images.split(BATCH)] if len(images) else []
        if not parts:
            return torch.zeros(0, len(self.classes)), torch.zeros(0, 0)
        logits, embeddings = zip(*parts, strict=True)
        return torch.cat(logits).float().cpu(), torch.cat(embeddings).cpu()

    def predict(self, images: Any, top: int = 3) -> list[Prediction]:
        """A prediction for each image, in order; one image by itself gives a list of one.

        images: paths, PIL images, NumPy arrays, tensors, or a list of any of them. Arrays are (H, W), (H, W, C) or
            (N, H, W, C), tensors (C, H, W) or (N, C, H, W); both uint8, or floating in 0 … 1. PIL images may be of any
            mode, as files may. All are scaled to the net's size, their middle cut out where the proportions differ.
        top: how many classes `Prediction.top` names.

        Raises DecodeError for a file that is no readable image, ValueError for an array that is no image.
        """
        return self.predictions(self.prepare(images), top)

    def predictions(self, images: Tensor, top: int = 3) -> list[Prediction]:
        """A prediction for each of uint8 images (B, C, H, W) of the net's size; raises Failure where the net gives no numbers."""
        logits, embeddings = self.look(images)
        if not logits.isfinite().all():
            raise Failure("the net's answers are not finite numbers, as its weights are too large: use another model")
        probabilities, order = logits.softmax(1).topk(min(top, len(self.classes)), dim=1)
        distances: list[float | None] = [None] * len(images)
        if self.tells_novelty and len(images):
            distances = novelty(embeddings, self.net.novelty, self.card.novelty).tolist()
        found = []
        for values, places, distance in zip(probabilities.tolist(), order.tolist(), distances, strict=True):
            best = tuple((self.classes[place], value) for place, value in zip(places, values, strict=True))
            unlike = None if distance is None else distance > self.card.novelty["threshold"]
            found.append(Prediction(best[0][0], best[0][1], best, distance, unlike))
        return found

    def prepare(self, images: Any) -> Tensor:
        """uint8 images (N, C, H, W) of the net's size from what `predict` takes."""
        if isinstance(images, Tensor | np.ndarray) and images.ndim == 4:
            images = list(images)
        elif not isinstance(images, Sequence) or isinstance(images, str):
            images = [images]
        arrays = [self._array(image) for image in images]
        empty = np.zeros((0, *self.size, self.channels), np.uint8)
        return torch.from_numpy(np.stack(arrays) if arrays else empty).permute(0, 3, 1, 2)

    def _array(self, image: Any) -> np.ndarray:
        """One image as uint8 (H, W, C) of the net's size, by the same steps as a file."""
        if isinstance(image, str | Path):
            return decode(image, self.size, self.channels)
        if not isinstance(image, Image.Image):
            image = Image.fromarray(_pixels(image))
        return pixels_of(image, self.size, self.channels)


def _pixels(image: Any) -> np.ndarray:
    """uint8 (H, W) or (H, W, 1 … 4) of an array (H, W[, C]) or a tensor (C, H, W) or (H, W)."""
    if isinstance(image, Tensor):
        array = image.detach().cpu().movedim(0, -1).numpy() if image.ndim == 3 else image.detach().cpu().numpy()
    else:
        array = np.asarray(image)
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)) or not array.size:
        raise ValueError(f"an image must be (H, W), (H, W, C) or, as a tensor, (C, H, W), not {tuple(np.shape(image))}")
    if np.issubdtype(array.dtype, np.floating):
        if not (np.isfinite(array).all() and array.min() >= 0 and array.max() <= 1):
            raise ValueError("an image of floating numbers must lie in 0 … 1: leave out the normalisation, or give uint8")
        array = (array * 255).round().astype(np.uint8)
    if array.dtype != np.uint8:
        raise ValueError(f"an image must be uint8 or floating in 0 … 1, not {array.dtype}")
    return array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array


def load(path: str | Path, device: str = "cpu") -> Classifier:
    """The classifier of a run folder, or of its `model.safetensors` alone.

    device: where it computes, such as "cuda"; images may lie anywhere.
    Raises UsageError when there is no such file, Failure when it is damaged or was not written by this program.
    """
    return Classifier(weights.load_model_file(path), device)
