"""Charts of a page as SVG text that takes its colours from the page, so that they are legible on light and dark."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from io import BytesIO, StringIO
from typing import Any, NamedTuple

import matplotlib
import torch
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image
from torch import Tensor

# ---- Whether probabilities can be believed: the reliability diagram's bins and the expected calibration error.

BINS = 15  # as in Guo et al. 2017


class Bin(NamedTuple):
    """The images whose predicted class has a probability in (low, high].

    images: how many. confidence: their mean probability. accuracy: the fraction of them that is right; both NaN of none.
    """

    low: float
    high: float
    images: int
    confidence: float
    accuracy: float


def reliability(probability: Tensor, hits: Tensor, bins: int = BINS) -> list[Bin]:
    """Images by the probability of the predicted class, in bins of equal width.

    probability: float (N,) in 0 … 1. hits: bool (N,), whether the prediction is right.
    """
    places = (probability * bins).ceil().long().sub(1).clamp(0, bins - 1)
    counts = torch.bincount(places, minlength=bins)
    confidence = torch.bincount(places, probability.double(), minlength=bins) / counts
    accuracy = torch.bincount(places, hits.double(), minlength=bins) / counts
    return [
        Bin(number / bins, (number + 1) / bins, int(count), float(mean), float(right))
        for number, (count, mean, right) in enumerate(zip(counts, confidence, accuracy, strict=True))
    ]


def expected_calibration_error(bins: list[Bin]) -> float:
    """The mean distance between probability and accuracy, in 0 … 1: Σ (images of a bin / all images) · |accuracy − confidence|.

    After C. Guo, G. Pleiss, Y. Sun and K. Q. Weinberger, On Calibration of Modern Neural Networks, ICML 2017.
    """
    images = sum(part.images for part in bins)
    return sum(part.images / images * abs(part.accuracy - part.confidence) for part in bins if part.images)


# What is drawn in these colours gets the page's: by name of its variables, and of its text.
INK, RULE, FIRST, SECOND, THIRD = "#010101", "#020202", "#030303", "#040404", "#050505"
OF_PAGE = {INK: "currentColor", RULE: "var(--rule)", FIRST: "var(--first)", SECOND: "var(--second)", THIRD: "var(--third)"}
SIZE = (4.4, 2.9)  # inches: as wide as a phone, so that the text is as large there as the page's

Points = Sequence[tuple[float, float]]


def line_chart(name: str, lines: Mapping[str, Points], label: str) -> str:
    """Curves over training steps as `<svg>`.

    Args:
        name: Of the chart, unlike any other's on the page.
        lines: (step, value) by what they are, at most three.
        label: What a screen reader says.
    """
    figure, axes = _figure()
    for (what, points), colour in zip(lines.items(), (FIRST, SECOND, THIRD), strict=False):
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, color=colour, linewidth=1.6, marker="o" if len(points) < 30 else None, markersize=3, label=what)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    if len(lines) > 1:
        axes.legend(frameon=False, labelcolor=INK, fontsize=9)
    return _svg(figure, name, label)


def reliability_diagram(name: str, bins: Sequence[Bin], label: str) -> str:
    """Accuracy over probability as bars beside the diagonal that a calibrated net would meet, as `<svg>`."""
    figure, axes = _figure()
    filled = [part for part in bins if part.images]
    width = bins[0].high - bins[0].low
    axes.bar([part.low for part in filled], [part.accuracy for part in filled], width, align="edge", color=FIRST,
             edgecolor="none", alpha=0.75, label="accuracy of the bin")  # fmt: skip
    means = [part.confidence for part in filled]
    axes.plot(means, means, color=SECOND, linestyle="none", marker="D", markersize=4, label="its mean probability")
    axes.plot((0, 1), (0, 1), color=INK, linewidth=1, linestyle=":")
    axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="probability of the predicted class")
    axes.legend(frameon=False, labelcolor=INK, fontsize=9, loc="upper left")
    return _svg(figure, name, label)


def _figure() -> tuple[Figure, Any]:
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    figure.patch.set_visible(False)
    axes.patch.set_visible(False)
    axes.grid(color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(RULE)
    axes.tick_params(which="both", color=RULE, labelcolor=INK, labelsize=9)
    axes.xaxis.label.set(color=INK, fontsize=9)
    return figure, axes


def _svg(figure: Figure, name: str, label: str) -> str:
    file = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    box = re.search(r'viewBox="[^"]+"', text)
    assert box is not None
    described = f'<svg {box[0]} role="img" aria-label="{escape(label)}">'
    text = described + text[text.index(">") + 1 :]
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r"font: [^;\"]*?([\d.]+px)[^;\"]*", r"font-size: \1", text)  # the page's font; how it is told depends on
    text = re.sub(r"font-family: [^;\"]*;?", "", text)  # matplotlib's version
    text = re.sub(r"\s*\n\s*", "\n", text)
    return re.sub("|".join(OF_PAGE), lambda match: OF_PAGE[match[0]], text)


# ---- Images of a set as small pictures.

GALLERY_SIZE = 24  # images
THUMBNAIL_PIXELS = 96  # pixels a side of what is shown; CIFAR's are scaled up by whole numbers, so that their pixels are seen


class Picture(NamedTuple):
    """One image of a gallery: its address, what it shows in words, and the lines below it."""

    uri: str
    alt: str
    lines: Sequence[str]


def thumbnail(image: Tensor, largest: int = THUMBNAIL_PIXELS) -> Image.Image:
    """A picture of uint8 (H, W, C) whose longer side is at most `largest`; small ones grow by a whole number."""
    pixels = image.cpu().numpy()
    picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    longest = max(picture.size)
    if longest <= largest:
        times = largest // longest
        return picture.resize((picture.width * times, picture.height * times), Image.Resampling.NEAREST)
    width, height = (max(1, round(side * largest / longest)) for side in picture.size)
    return picture.resize((width, height), Image.Resampling.LANCZOS)


def data_uri(image: Tensor, largest: int = THUMBNAIL_PIXELS) -> str:
    """The address that holds a picture of uint8 (H, W, C) itself.

    Up to half of `largest` pixels a side as they are, in a PNG; larger ones scaled to `largest` as a JPEG.
    """
    file = BytesIO()
    if max(image.shape[:2]) <= largest // 2:
        kind = "png"
        pixels = image.cpu().numpy()
        Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(file, "PNG", optimize=True)
    else:
        kind = "jpeg"
        thumbnail(image, largest).save(file, "JPEG", quality=85)
    return f"data:image/{kind};base64,{b64encode(file.getvalue()).decode()}"


def matrix_uri(matrix: Tensor) -> str:
    """The address of a picture of a confusion matrix int64 (classes, classes): a pixel a cell, darker by its row's fraction."""
    shares = (matrix / matrix.sum(1, keepdim=True).clamp_min(1)).sqrt()  # the root lets rare confusions be seen
    white, full = torch.tensor([255.0, 255.0, 255.0]), torch.tensor([0.0, 60.0, 120.0])
    return data_uri((white + (full - white) * shares[:, :, None]).round().to(torch.uint8), largest=2 * len(matrix))
