"""Plot accuracy over time for recipes: python scripts/benchmarks/curves.py laptop tudui --plot accuracy.png."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from cifar_lit.training.weight_average import WeightAverage
from lightning.pytorch.callbacks import Checkpoint
from script import run_script

from cifar_lit.bench.process import train, without_places
from cifar_lit.bench.report import Row, machine_text, make_parent, publish, spread
from cifar_lit.errors import UsageError
from cifar_lit.runs.compare import COLOURS, GREY
from cifar_lit.training.callbacks import Clock

WHAT = (
    "Train each recipe with several seeds, and test it at the end of each epoch with the clock stopped and the fit "
    "undisturbed. The curves show test accuracy; nothing is selected by it. Other flags are passed to the training."
)
VARIABLE = "CIFAR_LIT_CURVE"  # read by the callback: steps between tests, and the output file
WIDE = 8.0  # ratio of the recipes' times above which the time axis is logarithmic


class AccuracyCurve(Checkpoint):
    """Write [step, seconds of the fit, test accuracy] at the end of each epoch, and every so many steps.

    The Trainer calls a `Checkpoint` after all other callbacks, so the weight average already includes the current step.
    """

    def __init__(self) -> None:
        every, _, self._file = os.environ[VARIABLE].partition(":")
        self._every, self._tested_at = int(every), 0
        self._loader: Any = None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Test when the number of steps is reached."""
        if self._every and trainer.global_step // self._every > self._tested_at // self._every:
            self._test(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Test unless the current step is already tested."""
        if self._tested_at < trainer.global_step:
            self._test(trainer, pl_module)

    def _test(self, trainer: pl.Trainer, model: Any) -> None:
        clock = next(callback for callback in trainer.callbacks if isinstance(callback, Clock))  # type: ignore[attr-defined]
        torch.get_device_module(model.device).synchronize()
        clock.on_train_epoch_end(trainer, model)
        clock.on_train_end(trainer, model)  # stop the clock
        with undisturbed(trainer, model):
            self._loader = self._loader or trainer.datamodule.test_dataloader()  # type: ignore[attr-defined]
            self._tested_at = trainer.global_step
            with Path(self._file).open("a", encoding="utf-8") as file:
                file.write(
                    json.dumps([self._tested_at, clock.seconds, accuracy_of(trainer, model, self._loader)]) + "\n"
                )
            torch.get_device_module(model.device).synchronize()
        clock.on_train_start(trainer, model)


@contextmanager
def undisturbed(trainer: pl.Trainer, model: pl.LightningModule) -> Iterator[None]:
    """Switch to averaged weights and evaluation mode during a fit; restore modes and random states on exit."""
    averages = [callback for callback in trainer.callbacks if isinstance(callback, WeightAverage)]  # type: ignore[attr-defined]
    training = [module for module in model.modules() if module.training]
    with torch.random.fork_rng(devices=[]), torch.no_grad():  # loader workers draw from the CPU generator
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
    """Return the accuracy on the images of a loader, in the precision of the Trainer."""
    hits = images = 0
    for batch in loader:
        here = trainer.strategy.batch_to_device(batch)
        with trainer.precision_plugin.test_step_context():
            right = model(here.images).argmax(1) == here.labels
        hits += int(right.sum())
        images += int((here.labels >= 0).sum())  # negative labels are padding
    return hits / images


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.set_defaults(flags=[])
    parser.add_argument("names", nargs="*", metavar="RECIPE", help="recipes, before all other flags")
    parser.add_argument("--runs", type=int, default=3, help="number of seeds of each recipe")
    parser.add_argument("--every", type=int, default=0, metavar="STEPS", help="also test every so many optimizer steps")
    parser.add_argument(
        "--passes", default="", metavar="0.5,0.9", help="report when the accuracy first passes these fractions"
    )
    parser.add_argument("--plot", metavar="FILE.png", required=True, help="file of the plot")


def run(settings: argparse.Namespace) -> None:
    """Train and plot; raise UsageError or Failure with the last line of a training that failed."""
    if not settings.names or Path(settings.plot).suffix != ".png" or settings.runs < 1:
        raise UsageError("name one or more recipes first, a --plot FILE.png, and at least --runs 1")
    make_parent(Path(settings.plot))
    passes = [float(part) for part in settings.passes.split(",") if part]
    rows: list[Row] = []
    recipes = {}
    for name in settings.names:
        runs = [train_curve(name, seed, settings.every, settings.flags) for seed in range(settings.runs)]
        rows.append((f"{name}, accuracy at the end", spread(100 * run["curve"][-1][2] for run in runs), "%"))
        for value in passes:
            if seconds := [when for run in runs if (when := first_pass(run["curve"], value)) is not None]:
                rows.append((f"{name}, to {100 * value:g} %, {len(seconds)} of {len(runs)} runs", spread(seconds), "s"))
        recipes[name] = {"accelerator": runs[0]["accelerator"], "runs": runs, "passes": passes}
    own = {**vars(settings), "flags": without_places(settings.flags)}
    figures = publish("curves", own, ", ".join(settings.names), rows, f"drawn: {settings.plot}", recipes=recipes)
    plot(figures, Path(settings.plot))


def train_curve(recipe: str, seed: int, every: int, flags: Sequence[str]) -> dict[str, Any]:
    """Train in a new process; return seed, accelerator and curve, a list of (step, seconds, accuracy)."""
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


def first_pass(points: Sequence[Sequence[float]], threshold: float) -> float | None:
    """Return the seconds of the first point at or above an accuracy; None if there is none."""
    return next((seconds for _, seconds, accuracy in points if accuracy >= threshold), None)


# ---- drawing


class Line(NamedTuple):
    """Curve of a recipe over its runs: median seconds, and median, minimum and maximum accuracy in percent."""

    seconds: list[float]
    middle: list[float]
    low: list[float]
    high: list[float]


def line_of(runs: Sequence[Mapping[str, Any]]) -> Line:
    """Return the curve of a recipe's runs, as long as the shortest of them."""
    points = list(zip(*(run["curve"] for run in runs), strict=False))
    accuracies = [[100 * point[2] for point in same] for same in points]
    return Line(
        [statistics.median(point[1] for point in same) for same in points],
        *([function(values) for values in accuracies] for function in (statistics.median, min, max)),
    )


def plot(figures: Mapping[str, Any], file: Path) -> None:
    """Plot the curves as a PNG. The time axis is logarithmic if the recipes' times differ widely."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = {name: line_of(entry["runs"]) for name, entry in figures["recipes"].items()}
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, (name, line) in enumerate(lines.items()):
        colour = COLOURS[place % len(COLOURS)]
        axes.fill_between(line.seconds, line.low, line.high, color=colour, alpha=0.18, linewidth=0)
        label = f"{name} {line.middle[-1]:.1f} %, n = {len(figures['recipes'][name]['runs'])}"
        axes.plot(line.seconds, line.middle, color=colour, linewidth=1.8, marker="o", markersize=3.5, label=label)
    for threshold in {value for entry in figures["recipes"].values() for value in entry["passes"]}:
        axes.axhline(100 * threshold, color=GREY, linewidth=0.8, linestyle=(0, (2, 3)), zorder=1)
    ends = [line.seconds[-1] for line in lines.values()]
    if max(ends) > WIDE * min(ends):
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("test accuracy, %")
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="best", frameon=False)
    axes.set_title(
        "Accuracy on the test images while training: median and range over n seeds", loc="left", fontsize=10.5, pad=14
    )
    where = figures["environment"]
    accelerators = {entry["accelerator"] for entry in figures["recipes"].values()}
    machine = machine_text(where, accelerators.pop() if len(accelerators) == 1 else None)
    source = f"{machine} · torch {where['versions']['torch']} · {where['date']}"
    figure.supxlabel(source, fontsize=7.5, color=GREY, x=0.99, ha="right")
    figure.savefig(file, format="png")


if __name__ == "__main__":
    raise SystemExit(run_script())
