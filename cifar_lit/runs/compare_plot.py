"""The curves of several runs in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cifar_lit.runs.compare import RunRecord

# ---- The colours of plots.

# Okabe and Ito's colours, told apart with any colour vision; without the yellow, which is too light on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
GREY = "#666666"


STYLES = ("-", "--", ":", "-.")  # one for each time the colours have been gone through
SIDE, ROW = 4.6, 3.1  # inches of one panel


def curve(run: RunRecord, name: str) -> tuple[list[float], list[float]]:
    """Epochs that have ended, and the values of one column after each; metrics.csv counts epochs from 0."""
    found = [(row["epoch"], row[name]) for row in run.curves if row.get("epoch") is not None and row.get(name) is not None]
    return [float(epoch or 0) + 1 for epoch, _ in found], [float(value or 0) for _, value in found]


def seconds_per_epoch(run: RunRecord) -> float | None:
    """The mean over the training, None where it is not known."""
    seconds, epochs = run.metrics.get("train_seconds"), run.metrics.get("epochs")
    return seconds / epochs if seconds and epochs else None


def plot_curves(runs: Sequence[RunRecord], labels: Sequence[str], file: Path) -> None:
    """Draws accuracy and training loss against epochs, and against seconds where these are known, as a PNG.

    labels: what stands in the legend for each run; runs of one label share its colour. Accuracy is of the validation images,
    of the training images where no run has any. Raises ValueError when no run has a curve.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(labels))
    accuracy = next((name for name in ("val/accuracy", "train/accuracy") if any(curve(run, name)[0] for run in runs)), None)
    if accuracy is None:
        raise ValueError("none of these runs has a curve yet")
    timed = any(seconds_per_epoch(run) for run in runs)
    columns = min(len(names), 3 if timed else 2)
    legend_rows = -(-len(names) // columns)
    height = 2 * ROW + 0.22 * legend_rows + 0.2
    figure = Figure(figsize=(SIDE * (1 + timed), height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, 1 + timed, sharex="col", sharey="row", squeeze=False)
    what = {"val/accuracy": "validation accuracy, %", "train/accuracy": "training accuracy, %", "train/loss": "training loss"}
    lines: dict[str, Any] = {}
    for row, (name, scale) in enumerate(((accuracy, 100.0), ("train/loss", 1.0))):
        for run, label in zip(runs, labels, strict=True):
            epochs, values = curve(run, name)
            place = names.index(label)
            style = {
                "color": COLOURS[place % len(COLOURS)], "linestyle": STYLES[place // len(COLOURS) % len(STYLES)],
                "linewidth": 1.4, "marker": "o" if len(epochs) == 1 else None, "markersize": 4,
            }  # fmt: skip
            for column, unit in enumerate((1.0, seconds_per_epoch(run))[: 1 + timed]):
                if unit and epochs:
                    drawn = grid[row][column].plot(
                        [epoch * unit for epoch in epochs], [scale * value for value in values], **style
                    )
                    lines.setdefault(label, drawn[0])
        grid[row][0].set_ylabel(what[name])
    for axes in grid.flat:
        axes.grid(color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_xlim(left=0)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.tick_params(color="#999999", labelcolor="#333333")
    for column, text in enumerate(("epochs", "seconds of training (at each run's mean epoch)")[: 1 + timed]):
        grid[1][column].set_xlabel(text)
    figure.legend(list(lines.values()), list(lines), loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    figure.savefig(file, format="png")
