"""Accuracy against seconds for several recipes, drawn: python scripts/benchmarks/curves.py laptop tudui --plot accuracy.png."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from script import run_script

from cifar_lit.bench.commands import PassingParser
from cifar_lit.bench.process import train, without_places
from cifar_lit.bench.report import environment, headline, machine_text, make_parent, publish, spread, spread_text
from cifar_lit.errors import UsageError
from cifar_lit.runs.compare import COLOURS, GREY
from cifar_lit.training.callbacks import Clock, WeightAverage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

WHAT = (
    "Trains each recipe with several seeds, and tests it at the end of each epoch with the clock stopped and nothing in the fit "
    "changed. The curves are of the test images; nothing is chosen by them. What is not listed here goes to the training."
)
VARIABLE = "CIFAR_LIT_CURVE"  # for the callback in a training: steps between tests, and the file that takes the points
WIDE = 8.0  # the recipes' times span more than this factor: the axis of seconds is logarithmic


class AccuracyCurve(Checkpoint):
    """Writes [step, seconds of the fit, accuracy on all test images] at each epoch's end, and every so many steps.

    It is a `Checkpoint` so that the Trainer calls it after the callback that averages the weights, whose average of this step
    is what is tested.
    """

    def __init__(self) -> None:
        every, _, self._file = os.environ[VARIABLE].partition(":")
        self._every, self._tested_at = int(every), 0
        self._loader: Any = None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Tests if the steps are reached."""
        if self._every and trainer.global_step // self._every > self._tested_at // self._every:
            self._test(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tests, if the last step has not been tested already."""
        if self._tested_at < trainer.global_step:
            self._test(trainer, pl_module)

    def _test(self, trainer: pl.Trainer, model: Any) -> None:
        clock = next(callback for callback in trainer.callbacks if isinstance(callback, Clock))  # type: ignore[attr-defined]
        torch.get_device_module(model.device).synchronize()
        with clock.paused(), undisturbed(trainer, model):
            self._loader = self._loader or trainer.datamodule.test_dataloader()  # type: ignore[attr-defined]
            self._tested_at = trainer.global_step
            with Path(self._file).open("a") as file:
                file.write(json.dumps([self._tested_at, clock.seconds, accuracy_of(trainer, model, self._loader)]) + "\n")
            torch.get_device_module(model.device).synchronize()


@contextmanager
def undisturbed(trainer: pl.Trainer, model: pl.LightningModule) -> Iterator[None]:
    """For a look at the net amid a fit: the averaged weights in evaluation mode; modes and random numbers are put back."""
    averages = [callback for callback in trainer.callbacks if isinstance(callback, WeightAverage)]  # type: ignore[attr-defined]
    training = [module for module in model.modules() if module.training]
    with torch.random.fork_rng(devices=[]), torch.no_grad():  # workers that load images draw from the CPU's generator
        for average in averages:
            average.on_validation_epoch_start(trainer, model)
        model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True
            for average in averages:
                average.on_validation_epoch_end(trainer, model)


def accuracy_of(trainer: pl.Trainer, model: pl.LightningModule, loader: Any) -> float:
    """The fraction of a loader's images that the net classifies rightly, in the precision of the Trainer."""
    hits = images = 0
    for batch in loader:
        here = trainer.strategy.batch_to_device(batch)
        with trainer.precision_plugin.test_step_context():
            right = model(here.images).argmax(1) == here.labels
        hits += int(right.sum())
        images += int((here.labels >= 0).sum())  # below are images that only fill a batch up
    return hits / images


def main(argv: list[str]) -> None:
    """Trains, and draws; raises UsageError and Failure, a training's own with the line that it ended with."""
    parser = PassingParser(prog="curves.py", description=WHAT)
    parser.usage = "%(prog)s NAME [NAME …] [flags] [any flag of training]"
    parser.add_argument("--runs", type=int, default=3, help="seeds of each recipe (3)")
    parser.add_argument("--every", type=int, default=0, metavar="STEPS", help="test every so many optimizer steps too")
    parser.add_argument("--passes", default="", metavar="0.5,0.9", help="when the accuracy first passes these fractions")
    parser.add_argument("--x", choices=("auto", "linear", "log"), default="auto", help="the plot's axis of seconds (auto)")
    parser.add_argument("--plot", metavar="FILE.png", required=True, help="what is drawn")
    parser.add_argument("--json", metavar="FILE", help="write all points there too")
    count = next((place for place, word in enumerate(argv) if word.startswith("-")), len(argv))
    names, (settings, rest) = argv[:count], parser.parse_with_rest(argv[count:])
    if not names or Path(settings.plot).suffix != ".png":
        raise UsageError("name one or more recipes first, and a --plot FILE.png")
    make_parent(Path(settings.plot))
    passes = [float(part) for part in settings.passes.split(",") if part]
    recipes = {name: entry_of([run(name, seed, settings.every, rest) for seed in range(settings.runs)], passes) for name in names}
    ends = {name: spread(100 * run["curve"][-1][2] for run in entry["runs"]) for name, entry in recipes.items()}
    figures = {
        "bench": "curves",
        "settings": {"flags": without_places(rest), "every": settings.every},
        "environment": environment(),
        **headline(*((f"{name}, accuracy at the end", end, "%") for name, end in ends.items())),
        "recipes": recipes,
    }
    plot(figures, Path(settings.plot), settings.x)
    publish(
        figures,
        settings.json,
        "curves",
        ("recipe", "n", "accuracy at the end, %", *(f"s to {100 * value:g} %" for value in passes)),
        [
            (
                name,
                str(settings.runs),
                spread_text(ends[name], ".2f"),
                *(spread_text(value, ",.2f") if value else "never" for value in entry["passes"].values()),
            )
            for name, entry in recipes.items()
        ],
        f"drawn: {settings.plot}",
    )


def run(recipe: str, seed: int, every: int, flags: Sequence[str]) -> dict[str, Any]:
    """One training in a process of its own: its seed, accelerator and curve, as points of step, seconds and accuracy."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "points.txt"
        os.environ[VARIABLE] = f"{every}:{file}"
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, dict.fromkeys(paths)))
        callback = "--trainer.callbacks+=curves.AccuracyCurve"
        done = train(["--recipe", recipe, "--devices", "1", *flags, "--seed", str(seed), callback])
        points = [json.loads(line) for line in file.read_text().splitlines()]
    print(f"{recipe} seed {seed}: {points[-1][2]:.2%} after {points[-1][1]:.2f} s", file=sys.stderr, flush=True)
    return {"seed": seed, "accelerator": done.metrics["accelerator"], "curve": points}


def entry_of(runs: Sequence[dict[str, Any]], passes: Sequence[float]) -> dict[str, Any]:
    """The runs of a recipe, and the seconds at which their curves reach accuracies (None where none does)."""
    seconds = {value: [when for run in runs if (when := first_pass(run["curve"], value)) is not None] for value in passes}
    return {
        "accelerator": runs[0]["accelerator"],
        "runs": runs,
        "passes": {f"{value:g}": spread(times) if times else None for value, times in seconds.items()},
    }


def first_pass(points: Sequence[Sequence[float]], threshold: float) -> float | None:
    """Seconds of the first point (step, seconds, accuracy) at or above an accuracy; None if none is."""
    return next((seconds for _, seconds, accuracy in points if accuracy >= threshold), None)


# ---- drawing


class Line(NamedTuple):
    """One recipe over its runs: at each point the median seconds, and median, least and greatest accuracy in percent."""

    seconds: list[float]
    middle: list[float]
    low: list[float]
    high: list[float]


def line_of(runs: Sequence[Mapping[str, Any]]) -> Line:
    """The line of a recipe's runs, as long as the shortest curve."""
    points = list(zip(*(run["curve"] for run in runs), strict=False))
    accuracies = [[100 * point[2] for point in same] for same in points]
    return Line(
        [statistics.median(point[1] for point in same) for same in points],
        *([function(values) for values in accuracies] for function in (statistics.median, min, max)),
    )


def plot(figures: Mapping[str, Any], file: Path, axis: str = "auto") -> None:
    """Draws the curves of the figures as a PNG; `axis`: linear, log or auto, how seconds are laid out."""
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


if __name__ == "__main__":
    raise SystemExit(run_script(main))
