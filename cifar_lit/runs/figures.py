"""Figures of a run: curves and confusion matrix for the page, the run folder and TensorBoard, and small pictures.

They are drawn without pyplot, which would keep the figures in memory. The user's matplotlibrc is ignored.
"""

from __future__ import annotations

import re
import warnings
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from io import BytesIO, StringIO
from pathlib import Path
from typing import NamedTuple

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

from cifar_lit.base.files import atomic_write
from cifar_lit.base.text import printable
from cifar_lit.run.record import FEW_CLASSES, read_curves

own_style = style.context("default")

# ---- Curves. `as_svg` replaces these colours by the page's CSS variables.

INK, RULE = "#1b1f24", "#ccd3db"
PART_COLOURS = {"train": "#0072b2", "val": "#c34d00", "test": "#007a5a"}
PAGE_COLOURS = {
    INK: "currentColor", RULE: "var(--rule)",
    "#0072b2": "var(--first)", "#c34d00": "var(--second)", "#007a5a": "var(--third)",
}  # fmt: skip
PART_NAMES = {"train": "training", "val": "validation", "test": "test"}
Lines = Mapping[str, Sequence[tuple[float, float]]]  # (epochs trained, value) by part: train, val, test


def curves(run: Path) -> dict[str, Lines]:
    """Return the curves of loss and accuracy in metrics.csv.

    A training logs a row at the end of each epoch, so steps are converted to epochs.
    """
    rows = read_curves(run)
    ends = {0.0: 0.0}  # step by number of epochs
    for row in rows:
        if "train/loss" in row:
            ends[row["epoch"] + 1] = row["step"]
    found: dict[str, Lines] = {}
    for name in ("loss", "accuracy"):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            epochs = float(np.interp(row["step"], [*ends.values()], [*ends]))
            for part in PART_NAMES:
                if f"{part}/{name}" in row:
                    lines.setdefault(part, []).append((epochs, row[f"{part}/{name}"]))
        if lines:
            found[name] = lines
    return found


@own_style
def curve_figure(charts: Mapping[str, Lines]) -> Figure:
    """Draw curves over epochs side by side, by name. A single point is a diamond."""
    # At the width of a phone, the text of one chart has the size of the page's text.
    figure = Figure(figsize=(4.4 * len(charts), 2.9), dpi=150, layout="constrained")
    grid = figure.subplots(1, len(charts), squeeze=False, subplot_kw={"facecolor": "none"})[0]
    for axes, (name, lines) in zip(grid, charts.items(), strict=True):
        _draw_lines(axes, lines)
        axes.set_title(name, color=INK, fontsize=10)
    return figure


def _draw_lines(axes: Axes, lines: Lines) -> None:
    for part, points in lines.items():
        epochs, values = zip(*points, strict=True)
        (line,) = axes.plot(epochs, values, color=PART_COLOURS[part], linewidth=1.6, label=PART_NAMES[part])
        if len(points) == 1:
            line.set(linestyle="none", marker="D", markersize=6, clip_on=False)
    axes.set_xlabel("epochs")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    _finish(axes)


@own_style
def precision_recall_figure(lines: Mapping[str, tuple[Tensor, Tensor]]) -> Figure:
    """Draw precision over recall, float (N,) each, of up to three labels by name."""
    figure = Figure(figsize=(4.4, 2.9), dpi=150, layout="constrained")
    axes = figure.subplots(subplot_kw={"facecolor": "none"})
    for colour, (name, (precision, recall)) in zip(PART_COLOURS.values(), lines.items(), strict=False):
        axes.plot(recall, precision, color=colour, linewidth=1.6, label=_tick(name))
    axes.set(xlabel="recall", ylabel="precision", xlim=(0, 1.01), ylim=(0, 1.01))
    _finish(axes)
    return figure


def _finish(axes: Axes) -> None:
    """Add grid and legend, in the colours of the page."""
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=INK, fontsize=9)
    axes.grid(color=RULE, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(RULE)
    axes.tick_params(which="both", color=RULE, labelcolor=INK, labelsize=9)
    axes.legend(frameon=False, labelcolor=INK, fontsize=9)


# ---- Confusion matrix

MAX_DRAWN = 200  # classes of a picture


@own_style
def confusion_matrix(matrix: Tensor, classes: Sequence[str]) -> Figure:
    """Draw a confusion matrix, int64 (classes, classes), labels in rows: mistakes in orange, the rest in blue."""
    count = len(classes)
    side = min(11.0, 3.0 + 0.55 * count)  # inches
    figure = Figure(figsize=(side, side), dpi=100, layout="constrained")
    axes = figure.subplots(subplot_kw={"facecolor": "#cfe3f1"})
    mistakes = matrix.float().fill_diagonal_(torch.nan).numpy()
    # Black numbers are legible on all cells.
    axes.imshow(mistakes, cmap="Oranges", vmin=0, vmax=1.7 * np.nanmax(mistakes, initial=1))
    axes.set(xlabel="predicted class", ylabel="true class")
    if count <= FEW_CLASSES:
        for (label, predicted), images in np.ndenumerate(matrix.numpy()):
            if images:
                axes.text(predicted, label, images, ha="center", va="center", fontsize=9)
        names = [_tick(name) for name in classes]
        axes.set_xticks(range(count), names, rotation=90)
        axes.set_yticks(range(count), names)
    axes.set_title(f"{int(matrix.diag().sum()):,} of {int(matrix.sum()):,} images correct")
    return figure


def _tick(name: str) -> str:
    """Return a short name for an axis. Dollar signs are escaped, as matplotlib parses formulas between them."""
    plain = printable(name)
    if len(plain) > 18:
        plain = plain[:17] + "…"
    return plain.replace("$", r"\$")


# ---- Files of figures


def as_svg(figure: Figure, name: str, label: str) -> str:
    """Return a chart as `<svg>` in the colours of the page.

    name: unique name of the chart on the page. label: text for screen readers.
    """
    file = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=metadata, transparent=True)
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


def save_picture(path: Path, figure: Figure) -> None:
    """Write a figure as PNG."""
    with atomic_write(path) as partial:
        to_pil_image(as_pixels(figure)).save(partial, "png")


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
