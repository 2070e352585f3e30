"""Figures of a run: charts in the colours of the page, and pictures for the page and TensorBoard.

They are drawn without pyplot, which would keep the figures in memory. The user's matplotlibrc is ignored.
"""

from __future__ import annotations

import re
import warnings
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from io import BytesIO, StringIO
from typing import TYPE_CHECKING, NamedTuple

import matplotlib
import numpy as np
import torch
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from cifar_lit.base.text import printable
from cifar_lit.inference.calibration import Bin

if TYPE_CHECKING:
    pass

own_style = style.context("default")

# ---- Charts. `as_svg` replaces these placeholder colours by the page's CSS variables.

INK, RULE, FIRST, SECOND, THIRD = "#010101", "#020202", "#030303", "#040404", "#050505"
PAGE_COLOURS = {
    INK: "currentColor", RULE: "var(--rule)", FIRST: "var(--first)", SECOND: "var(--second)", THIRD: "var(--third)",
}  # fmt: skip
PART_COLOURS = {"train": FIRST, "val": SECOND, "test": THIRD}
PART_NAMES = {"train": "training", "val": "validation", "test": "test"}


@own_style
def line_chart(lines: Mapping[str, Sequence[tuple[float, float]]]) -> Figure:
    """Draw curves over training steps.

    lines: (step, value) by part (train, val, test), or by the name of the only curve. A single point is a diamond.
    """
    figure, axes = _new_chart()
    for part, points in lines.items():
        steps, values = zip(*points, strict=True)
        (line,) = axes.plot(steps, values, color=PART_COLOURS.get(part, INK), linewidth=1.6, markersize=3)
        line.set_label(PART_NAMES.get(part, _tick(part)))
        if len(points) == 1:
            line.set(linestyle="none", marker="D", markersize=6)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    if len(lines) > 1:
        axes.legend(frameon=False, labelcolor=INK, fontsize=9)
    return figure


@own_style
def reliability_diagram(bins: Sequence[Bin]) -> Figure:
    """Draw accuracy over probability, with the diagonal of a perfectly calibrated net."""
    figure, axes = _new_chart()
    lows, _, _, means, accuracies = zip(*bins, strict=True)  # matplotlib skips NaN
    axes.bar(lows, accuracies, 1 / len(bins), align="edge", color=FIRST, alpha=0.75, label="accuracy")
    axes.plot(means, means, color=SECOND, linestyle="none", marker="D", markersize=4, label="mean probability")
    axes.plot((0, 1), (0, 1), color=INK, linewidth=1, linestyle=":", label="perfect calibration")
    axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="probability of the predicted class")
    axes.legend(frameon=False, labelcolor=INK, fontsize=9, loc="upper left")
    return figure


def _new_chart() -> tuple[Figure, Axes]:
    # At the width of a phone, the text has the size of the page's text.
    figure = Figure(figsize=(4.4, 2.9), facecolor="none")
    # Numbers of seven digits and a factor above the axis fit. Constrained layout would take half of a report's time.
    figure.subplots_adjust(left=0.16, right=0.96, bottom=0.16, top=0.92)
    axes = figure.subplots(subplot_kw={"facecolor": "none"})
    axes.grid(color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(RULE)
    axes.tick_params(which="both", color=RULE, labelcolor=INK, labelsize=9)
    axes.xaxis.label.set(color=INK, fontsize=9)
    return figure, axes


MAX_COUNTED = 20  # with more classes the cells of a confusion matrix have no numbers


@own_style
def confusion_matrix(matrix: Tensor, classes: Sequence[str]) -> Figure:
    """Draw a confusion matrix, int64 (classes, classes), labels in rows.

    Darker cells hold a larger fraction of their row.
    """
    count = len(classes)
    side = min(11.0, 3.0 + 0.55 * count)  # inches
    size = max(4.0, min(10.0, 600.0 / (8 + count)))  # points of the text
    figure = Figure(figsize=(side, side), dpi=100, layout="constrained")
    axes = figure.subplots()
    # The square root makes rare confusions visible.
    shares = (matrix / matrix.sum(1, keepdim=True).clamp_min(1)).sqrt().numpy()
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1.7)  # black numbers are legible on all cells
    if count <= MAX_COUNTED:
        for (label, predicted), images in np.ndenumerate(matrix.numpy()):
            axes.text(predicted, label, images, ha="center", va="center", fontsize=max(6, size))
    names = [_tick(name) for name in classes]
    axes.set_xticks(range(count), names, rotation=90, fontsize=size)
    axes.set_yticks(range(count), names, fontsize=size)
    axes.set(xlabel="predicted class", ylabel="true class")
    axes.set_title(f"{int(matrix.diag().sum()):,} of {int(matrix.sum()):,} images correct")
    return figure


def _tick(name: str, limit: int = 18) -> str:
    """Return a short name for an axis. Dollar signs are escaped, as matplotlib parses formulas between them."""
    plain = printable(name)
    if len(plain) > limit:
        plain = plain[: limit - 1] + "…"
    return plain.replace("$", r"\$")


def as_svg(figure: Figure, name: str, label: str) -> str:
    """Return a chart as `<svg>` in the colours of the page.

    name: unique name of the chart on the page. label: text for screen readers.
    """
    file = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    start = f'<svg role="img" aria-label="{escape(printable(label))}"'
    text = re.sub(r"^.*?<svg", lambda _: start, file.getvalue(), count=1, flags=re.DOTALL)
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", text)  # unique among all charts of the page
    return re.sub("|".join(PAGE_COLOURS), lambda match: PAGE_COLOURS[match[0]], text)


def as_pixels(figure: Figure) -> Tensor:
    """Return a figure as a picture, uint8 (3, height, width)."""
    canvas = FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a missing glyph is drawn as a box
        canvas.draw()
    return torch.from_numpy(np.asarray(canvas.buffer_rgba())[:, :, :3].copy()).permute(2, 0, 1)


# ---- Images.

GALLERY_SIZE = 24  # images
THUMBNAIL_PIXELS = 96  # maximum height and width


class Picture(NamedTuple):
    """An image of the page: data URI, alternative text and caption lines."""

    uri: str
    alt: str
    lines: Sequence[str]


def data_uri(image: Tensor, largest: int = THUMBNAIL_PIXELS) -> str:
    """Return a data URI of an image, uint8 (H, W, C), at most `largest` pixels high and wide.

    An image of at most half of `largest` is a lossless PNG, a larger one a JPEG.
    """
    file, picture = BytesIO(), to_pil_image(image.permute(2, 0, 1))
    kind = "jpeg"
    if max(picture.size) <= largest // 2:
        kind = "png"
    picture.thumbnail((largest, largest), Image.Resampling.LANCZOS)
    picture.save(file, kind, quality=85, optimize=True)
    return f"data:image/{kind};base64,{b64encode(file.getvalue()).decode()}"
