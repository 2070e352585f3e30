"""`Classifier`: a trained net that predicts class names for images of any type and size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cifar_lit.base.files import read_json
from cifar_lit.base.text import listed, printable
from cifar_lit.base.trust import trusting
from cifar_lit.data.photos.decode import decode, pixels_of
from cifar_lit.inference.model_file import LoadedNet, load_model_file
from cifar_lit.inference.rejection import FALSE_ALARMS, check_rate, novelty, threshold
from cifar_lit.inference.sets import prediction_sets, set_limit

Picture = str | Path | Image.Image | np.ndarray | Tensor
Pictures = Picture | Sequence[Picture]
HUB = "hf://"  # begin of the name of a model on the Hugging Face hub
FETCH = "cifar_lit.extras.hub:fetch"  # for models on the Hugging Face hub


@dataclass(frozen=True)
class Prediction:
    """The prediction for one image."""

    label: str
    probability: float  # 0 … 1
    top: tuple[tuple[str, float], ...]  # the most probable classes with their probabilities, the best first
    novelty: float  # energy of the logits: high for images that resemble none of the classes
    # Whether the image is rejected, None if the model has no scores of held-out images. It is a hint: more than half of
    # the pictures of other subjects were not rejected, see docs/probabilities.md.
    unknown: bool | None
    # Classes of which one is the true one with the probability `coverage`, the best first; None without `coverage`.
    # With several labels an image, those above their thresholds; `label` has them with `|` between them.
    prediction_set: tuple[str, ...] | None = None


class Classifier:
    """A trained net with its class names, in the order of its logits.

    Args:
        net: the net with its model card.
        device: device of the net. Images may be on any device.
        accuracy: test accuracy of the run, 0 … 1, if known.
    """

    def __init__(self, net: LoadedNet, device: str = "cpu", accuracy: float | None = None) -> None:
        self.accuracy = accuracy
        self.net = net.on(device)
        self.card, self.classes = net.card, net.classes
        self.reject: float | None = FALSE_ALARMS  # default rate of `predict`; None marks no image
        self.coverage: float | None = None  # default sets of `predict`; None returns none
        self.preparation = net.card.preparation

    def __repr__(self) -> str:
        """Return net, classes, image size and test accuracy in one line."""
        size = "×".join(map(str, self.card.input_shape))
        text = f"{self.card.net}, {len(self.classes)} classes ({listed(self.classes)}), images {size}"
        if self.accuracy is not None:
            text += f", test accuracy {self.accuracy:.4f}"
        return printable(f"Classifier({text})")

    def __call__(self, images: Tensor) -> Tensor:
        """Return float32 logits (B, classes), on the CPU, for uint8 images (B, C, H, W) of the net's size."""
        if not len(images):
            return torch.zeros(0, len(self.classes))
        return self.net.logits(images)

    def predict(
        self, images: Pictures, top: int = 3, reject: float | None = None, coverage: float | None = None
    ) -> list[Prediction]:
        """Return a prediction for each image, in order; a list of one for a single image.

        Args:
            images: paths, PIL images of any mode, NumPy arrays, tensors, or a list of any of them. Arrays are (H, W),
                (H, W, C) or (N, H, W, C), tensors (C, H, W) or (N, C, H, W); both uint8, or floating in 0 … 1. All are
                resized to the net's size like its training images, see `ModelCard.resize`.
            top: number of classes in `Prediction.top`.
            reject: false-alarm rate of `Prediction.unknown`: share of images of the known classes, above 0 and up to
                0.5, that are marked too. Default: 0.05.
            coverage: probability that `Prediction.prediction_set` contains the true class, such as 0.95.
                Default: no sets.

        Raises:
            UsageError: `reject` or `coverage` is invalid, or needs more held-out images than this model had.
            DecodeError: a file is not a readable image.
            ValueError: an array is not an image.
        """
        return self.predict_batch(self.prepare(images), top, reject, coverage)

    def predict_batch(
        self, images: Tensor, top: int = 3, reject: float | None = None, coverage: float | None = None
    ) -> list[Prediction]:
        """Return the result of `predict` for uint8 images (B, C, H, W) of the net's size."""
        if reject is None:
            reject = self.reject
        check_rate(reject)
        if coverage is None:
            coverage = self.coverage
        logits = self(images)
        probabilities, order = self.net.probabilities(logits).sort(dim=1, descending=True)
        highest = None
        if reject is not None and self.card.reject is not None:
            highest = threshold(self.card.reject, reject)
        sizes: list[int | None] = [None] * len(logits)  # classes in each prediction set
        if coverage is not None:
            sizes = prediction_sets(probabilities, set_limit(self.card.coverage, coverage)).sum(1).tolist()
        predictions = []
        columns = probabilities.tolist(), order.tolist(), novelty(logits).tolist(), sizes
        for values, labels, score, size in zip(*columns, strict=True):
            names = [self.classes[label] for label in labels]
            best = tuple(zip(names[:top], values, strict=False))
            unknown = prediction_set = None
            if highest is not None:
                unknown = score > highest
            if size is not None:
                prediction_set = tuple(names[:size])
            text = names[0]
            if self.card.thresholds is not None:
                own = [self.card.thresholds[label] for label in labels]
                prediction_set = tuple(
                    name for name, value, least in zip(names, values, own, strict=True) if value >= least
                )
                text = "|".join(prediction_set)
            predictions.append(Prediction(text, values[0], best, score, unknown, prediction_set))
        return predictions

    def prepare(self, images: Pictures) -> Tensor:
        """Return images, of any type that `predict` accepts, as uint8 (N, C, H, W) of the net's size."""
        each: Sequence[Picture]
        if isinstance(images, Tensor | np.ndarray) and images.ndim == 4:
            each = list(images)
        elif isinstance(images, Sequence) and not isinstance(images, str):
            each = images
        else:
            each = [images]
        channels, height, width = self.card.input_shape
        array = np.zeros((len(each), height, width, channels), np.uint8)
        for index, image in enumerate(each):
            array[index] = self._prepare_one(image)
        return torch.from_numpy(array).permute(0, 3, 1, 2)

    def _prepare_one(self, image: Picture) -> np.ndarray:
        if isinstance(image, str | Path):
            return decode(image, self.preparation)
        if not isinstance(image, Image.Image):
            image = _to_pil(image)
        return pixels_of(image, self.preparation)


def _to_pil(image: Tensor | np.ndarray) -> Image.Image:
    if isinstance(image, Tensor):
        array = image.detach().cpu().numpy()
        if image.ndim == 3:
            array = array.transpose(1, 2, 0)
    else:
        array = np.asarray(image)
    if array.shape[2:] not in ((), (1,), (3,), (4,)):
        raise ValueError(f"an image must be (H, W), (H, W, C) or, as a tensor, (C, H, W), not {tuple(np.shape(image))}")
    if np.issubdtype(array.dtype, np.floating):
        is_in_range = (array >= 0) & (array <= 1)  # false for NaN
        if not is_in_range.all():
            raise ValueError("a floating-point image must be in 0 … 1: do not normalise it, or pass uint8")
        array = (array * 255).round().astype(np.uint8)
    if array.dtype != np.uint8:
        raise ValueError(f"an image must be uint8, or floating-point in 0 … 1, not {array.dtype}")
    if array.shape[2:] == (1,):
        array = array[:, :, 0]
    return Image.fromarray(array)


def load(path: str | Path, device: str = "cpu", trust: bool = False) -> Classifier:
    """Return the classifier of a run folder, or of a `model.safetensors`, on a device such as "cuda".

    Args:
        path: the folder or file, or a model on the Hugging Face hub as `hf://USER/NAME@REVISION`.
        device: device of the net.
        trust: import a net that the file names by its import path, such as `my_nets.MyNet`. Its code runs.

    Raises:
        UsageError: there is no such file, or it names a net to import.
        Failure: the file is damaged or was not written by this program, or it cannot be downloaded.
    """
    if isinstance(path, str) and path.startswith(HUB):
        path = resolve_name(FETCH)(path)
    with trusting(trust):
        net = load_model_file(path)
    tested = read_json(Path(path).expanduser() / "metrics.json").get("test") or {}
    return Classifier(net, device, tested.get("accuracy"))
