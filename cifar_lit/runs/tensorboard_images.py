"""Figures for TensorBoard, drawn without pyplot, which would keep them all."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from cifar_lit.runs.charts import thumbnail

DPI = 100
MAX_COUNTED = 20  # classes up to which a confusion matrix has its numbers written in
BLUE, VERMILION = "#0072B2", "#D55E00"  # of Okabe and Ito's colours, told apart with any colour vision
MAX_NAME = 18


def confusion_matrix(matrix: Tensor, classes: Sequence[str]) -> Tensor:
    """The picture of a confusion matrix int64 (classes, classes), labels down and predictions across: uint8 (3, H, W)."""
    count = len(classes)
    side, size = min(11.0, 3.0 + 0.55 * count), max(4.0, min(10.0, 600.0 / (8 + count)))
    figure, axes = _figure(side, side)
    axes.imshow(matrix.numpy(), cmap="Blues")
    if count <= MAX_COUNTED:
        dark = matrix.max() / 2
        for (label, predicted), images in np.ndenumerate(matrix.numpy()):
            colour = "white" if images > dark else "black"
            axes.text(predicted, label, images, ha="center", va="center", fontsize=max(6, size), color=colour)
    names = [_tick(name) for name in classes]
    axes.set_xticks(range(count), names, rotation=90, fontsize=size)
    axes.set_yticks(range(count), names, fontsize=size)
    axes.set(xlabel="predicted class", ylabel="true class")
    axes.set_title(f"{int(matrix.diag().sum()):,} of {int(matrix.sum()):,} images right")
    return _pixels(figure)


def class_accuracies(matrix: Tensor, classes: Sequence[str]) -> Tensor:
    """The picture of each class's accuracy as a bar, from its row of the confusion matrix: uint8 (3, H, W)."""
    counts = matrix.sum(1)
    accuracies = (matrix.diag() / counts).nan_to_num()
    overall = float(matrix.diag().sum() / matrix.sum())
    figure, axes = _figure(7.0, 1.2 + 0.26 * len(classes))
    places = np.arange(len(classes))
    axes.barh(places, accuracies.numpy(), color=[BLUE if accuracy >= overall else VERMILION for accuracy in accuracies])
    for place, (accuracy, count) in enumerate(zip(accuracies.tolist(), counts.tolist(), strict=True)):
        text = f"{accuracy:.3f}" if count else "no image"
        inside = accuracy > 0.15
        axes.text(accuracy - 0.01 if inside else accuracy + 0.01, place, text, va="center", ha="right" if inside else "left",
                  fontsize=8, color="white" if inside else "black")  # fmt: skip
    axes.axvline(overall, color="black", linewidth=1, linestyle=":")
    axes.set_yticks(places, [_tick(name) for name in classes], fontsize=8)
    axes.set(xlim=(0, 1), ylim=(len(classes) - 0.4, -0.6), xlabel=f"accuracy; dotted: of all images, {overall:.4f}")
    axes.spines[["top", "right"]].set_visible(False)
    return _pixels(figure)


def gallery(images: Tensor, captions: Sequence[tuple[str, str]], columns: int = 6, cell: int = 96) -> Tensor:
    """The picture of images uint8 (N, H, W, C) in a grid, each with two lines below: uint8 (3, height, width).

    captions: the lines. With no image, the picture says so.
    """
    rows = max(1, -(-len(images) // columns))
    pitch, line = cell + 24, 16
    canvas = np.full((rows * (cell + 3 * line), columns * pitch, 3), 255, np.uint8)
    figure = Figure(figsize=(canvas.shape[1] / DPI, canvas.shape[0] / DPI), dpi=DPI)
    for place, image in enumerate(images):
        top, left = place // columns * (cell + 3 * line), place % columns * pitch + (pitch - cell) // 2
        picture = np.asarray(thumbnail(image, cell).convert("RGB"))
        high, wide = picture.shape[:2]
        canvas[top : top + high, left + (cell - wide) // 2 : left + (cell - wide) // 2 + wide] = picture
    figure.figimage(canvas)
    for place, lines in enumerate(captions):
        top, middle = place // columns * (cell + 3 * line) + cell, place % columns * pitch + pitch / 2
        for number, text in enumerate(lines):
            down = 1 - (top + 11 + number * 14) / canvas.shape[0]
            figure.text(
                middle / canvas.shape[1], down, _short(text, 22), ha="center", va="center", fontsize=7.5, parse_math=False
            )
    if not captions:
        figure.text(0.5, 0.5, "none", ha="center", va="center")
    return _pixels(figure)


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    return figure, figure.subplots()


def _pixels(figure: Figure) -> Tensor:
    canvas = FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # of a name that the font lacks: it is drawn as a box
        canvas.draw()
    return torch.from_numpy(np.asarray(canvas.buffer_rgba())[:, :, :3].copy()).permute(2, 0, 1)


def _short(name: str, most: int = MAX_NAME) -> str:
    """A name cut to fit, of letters that can be drawn."""
    plain = "".join(letter if letter.isprintable() else "�" for letter in name)
    return plain if len(plain) <= most else plain[: most - 1] + "…"


def _tick(name: str) -> str:
    """The same beside an axis, where matplotlib would take what stands between dollars for a formula."""
    return _short(name).replace("$", r"\$")
