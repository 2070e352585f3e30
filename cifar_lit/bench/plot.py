"""The plot of accuracy against seconds for several recipes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cifar_lit.bench.summary import machine_text
from cifar_lit.runs.compare import COLOURS, GREY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

WIDE = 8.0  # the recipes' times span more than this factor: the axis of seconds is logarithmic


class Line(NamedTuple):
    """One recipe over its runs: at each point the median seconds, and median, least and greatest accuracy in percent."""

    seconds: list[float]
    middle: list[float]
    low: list[float]
    high: list[float]


def line_of(runs: Sequence[Mapping[str, Any]]) -> Line:
    """The line of a recipe's runs, as long as the shortest curve; times are of the warm runs where there are any."""
    warm = [run["curve"] for run in runs if not run["first"]] or [run["curve"] for run in runs]
    curves = [run["curve"] for run in runs]
    count = min(len(curve) for curve in curves)
    accuracies = [[100 * curve[place][2] for curve in curves] for place in range(count)]
    return Line(
        [statistics.median(curve[place][1] for curve in warm) for place in range(count)],
        [statistics.median(values) for values in accuracies],
        [min(values) for values in accuracies],
        [max(values) for values in accuracies],
    )


def plot(figures: Mapping[str, Any], file: Path, axis: str = "auto") -> None:
    """Draws the curves of `bench recipe`'s figures as a PNG.

    axis: linear, log or auto, how seconds are laid out.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = {name: line_of(entry["runs"]) for name, entry in figures["recipes"].items()}
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    ends = [line.seconds[-1] for line in lines.values()]
    log = axis == "log" or (axis == "auto" and max(ends) > WIDE * min(ends))
    _lay_out(axes, lines, log)
    bottom, top = axes.get_ylim()
    thresholds = {float(text) for entry in figures["recipes"].values() for text in entry["passes"]}
    for threshold in (value for value in sorted(thresholds) if bottom < 100 * value < top):
        axes.axhline(100 * threshold, color=GREY, linewidth=0.8, linestyle=(0, (2, 3)), zorder=1)
        axes.annotate(
            f"{100 * threshold:g} %", (1, 100 * threshold), xycoords=("axes fraction", "data"), ha="right",
            xytext=(-4, 3), textcoords="offset points", fontsize=8, color=GREY,
        )  # fmt: skip
    named = []
    for place, (name, line) in enumerate(lines.items()):
        colour = COLOURS[place % len(COLOURS)]
        axes.fill_between(line.seconds, line.low, line.high, color=colour, alpha=0.18, linewidth=0)
        marker = "o" if len(line.seconds) <= 20 else None
        (drawn,) = axes.plot(line.seconds, line.middle, color=colour, linewidth=1.8, marker=marker, markersize=3.5)
        named.append((f"{name} {line.middle[-1]:.1f} %, n = {len(figures['recipes'][name]['runs'])}", drawn))
    axes.set_title("Accuracy on the test images while training: median and range over n seeds", loc="left", fontsize=10.5, pad=14)
    where = figures["environment"]
    accelerators = {entry["accelerator"] for entry in figures["recipes"].values()}
    machine = machine_text(where, accelerators.pop() if len(accelerators) == 1 else None)
    said = f"{machine} · torch {where['versions']['torch']} · {where['date']}"
    figure.supxlabel(said, fontsize=7.5, color=GREY, x=0.99, ha="right")
    _label_ends(figure, axes, named)
    figure.savefig(file, format="png")


def _lay_out(axes: Axes, lines: Mapping[str, Line], log: bool) -> None:
    """Scales, grid and names of the axes."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    last = max(line.seconds[-1] for line in lines.values())
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlim(min(line.seconds[0] for line in lines.values()) / 1.3, last * 1.15)
    else:
        axes.set_xlim(0, last * 1.04)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    lowest = min(min(line.low) for line in lines.values())
    highest = max(max(line.high) for line in lines.values())
    margin = max(1.0, 0.06 * (highest - lowest))
    axes.set_ylim(max(0.0, lowest - margin), highest + 3 * margin)  # with room for the names
    bottom, top = axes.get_ylim()
    axes.set_yticks([tick for tick in axes.get_yticks() if bottom <= tick <= min(100.0, top)])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("test accuracy, %")
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#999999")
    axes.tick_params(color="#999999", labelcolor="#333333")


# Where a name may stand beside the end of its line: offset in points, horizontal and vertical alignment.
PLACES = (
    ((4, 6), "right", "bottom"), ((7, 0), "left", "center"), ((5, 4), "left", "bottom"), ((5, -4), "left", "top"),
    ((4, -7), "right", "top"), ((4, 20), "right", "bottom"),
)  # fmt: skip


def _label_ends(figure: Figure, axes: Axes, named: Sequence[tuple[str, Line2D]]) -> None:
    """Writes each name beside the end of its line, where it covers least of the lines and of other names."""
    import numpy as np
    from matplotlib.patheffects import withStroke

    figure.draw_without_rendering()  # lays out, so that texts can be measured
    corners: list[Any] = [line.get_xydata() for _, line in named]  # float (n, 2) each
    drawn = np.concatenate([_pixels(axes.transData.transform(xy)) for xy in corners])
    ends = [(name, line, xy[-1]) for (name, line), xy in zip(named, corners, strict=True)]
    taken: list[Any] = []
    for name, line, end in sorted(ends, key=lambda entry: float(entry[2][1])):
        choices = []
        for rank, (offset, horizontal, vertical) in enumerate(PLACES):
            text = axes.annotate(
                name, end, xytext=offset, textcoords="offset points", fontsize=9, color=line.get_color(),
                ha=horizontal, va=vertical, path_effects=[withStroke(linewidth=3, foreground="white")],
            )  # fmt: skip
            box = text.get_window_extent()
            covered = int(box.padded(3).count_contains(drawn)) + 1000 * sum(box.overlaps(other) for other in taken)
            outside = not (axes.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and axes.bbox.y0 <= box.y0)
            choices.append((covered + 1000 * outside, rank, text, box))
        chosen = min(choices)
        taken.append(chosen[3])
        for choice in choices:
            if choice is not chosen:
                choice[2].remove()


def _pixels(corners: Any) -> Any:
    """Points (n, 2) at most two pixels apart along the line through `corners` (m, 2), in pixels."""
    import numpy as np

    along = np.concatenate([[0.0], np.hypot(*np.diff(corners, axis=0).T).cumsum()])
    wanted = np.linspace(0, along[-1], 2 + int(along[-1] / 2))
    return np.stack([np.interp(wanted, along, corners[:, axis]) for axis in (0, 1)], axis=1)
