"""`cifar-lit bench recipe`: recipes trained and tested with many seeds, as means with their intervals, times and memory."""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import resource
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

import cifar_lit
from cifar_lit.bench.process import without_places
from cifar_lit.bench.progress import Progress, StepProgress
from cifar_lit.bench.report import FEW, environment, figures_of, print_table, spread, spread_text, write_figures
from cifar_lit.cli.fit import TrainingCLI, program
from cifar_lit.cli.flags import OWN, SHORT, check_one_device, parse, recipe_path, recipe_settings
from cifar_lit.data.sources import SOURCES
from cifar_lit.errors import Failure, UsageError, nearest
from cifar_lit.runs.run_folder import display_path, read_metrics
from cifar_lit.stats import mean_interval
from cifar_lit.text import say
from cifar_lit.training.orderly_stop import Interrupted

WHAT = (
    "Seeds of recipes: test accuracy with its interval, warm and cold time, memory. With --json, a measurement that was stopped "
    "goes on when the same line is typed again. What is not listed here goes to the training."
)
NOT_TAKEN = ("seed", "seed_everything", "recipe", "resume", "ckpt_path")  # flags of training
CODE = (
    "data/**/*.py",
    "models/**/*.py",
    "training/**/*.py",
    "cli/fit.py",
    "hardware.py",
    "train.py",
)  # what results depend on
LEGEND = (
    f"± is the standard deviation over n seeds; behind n, from n = {FEW} on, the 95 % interval of the mean (Student's t)",
    "training is the whole fit with its validations: median and quartiles, of n < 4 the range, warm if any is",
    "start to end is from the process's start to the tested net; peak memory is of the process, with all runs before",
    "The runs share one process, and the images, which are decoded and held once; each draws all that is random from its seed.",
)
Runs = dict[int, dict[str, Any]]  # of a recipe, as `run_once` returns them, by seed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this measurement."""
    parser.set_defaults(flags=[])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="recipes, or YAML files of your own; first on the line"
    )
    parser.add_argument(
        "--runs", type=int, default=3, help="seeds of each recipe; those that the --json FILE holds are kept"
    )
    parser.add_argument("--seed0", type=int, default=0, help="the first of them")


def run(settings: argparse.Namespace) -> None:
    """Measures and reports; what is finished is in the --json file, also when it is stopped."""
    recipes = check(settings)
    # Each data set is decoded once, for all runs of this process.
    SOURCES.update({name: replace(source, load=cache(source.load)) for name, source in SOURCES.items()})
    conditions = {name: conditions_of(path, settings.flags) for name, path in recipes.items()}
    file = Path(settings.json) if settings.json else None
    runs = {name: dict[int, dict[str, Any]]() for name in recipes} | read_runs(file, conditions)
    command = parse("train", list(settings.flags))
    seeds = range(settings.seed0, settings.seed0 + settings.runs)
    missing = {name: [seed for seed in seeds if seed not in runs[name]] for name in recipes}
    for name, done in runs.items():
        if done:
            left = len(missing[name])
            say(f"{name}: {len(done)} runs are done already (in {display_path(Path(settings.json))}); {left} to go")
    total = sum(map(len, missing.values()))
    progress = Progress(total, "training")
    say(f"{total} trainings, one after the other: how long they take is said after the first's first steps")
    trained = 0
    try:
        for name, seed in [(recipe, seed) for recipe in recipes for seed in missing[recipe]]:
            done = runs[name]
            run = run_once(
                str(recipes[name]), settings.flags, seed, command.logs, not trained, StepProgress(progress, trained)
            )
            done[seed] = run | {"first": seed == missing[name][0]}
            trained += 1
            if file:
                entries = {
                    name: {
                        "settings": conditions[name],
                        "accuracy": accuracy_of(same),
                        "runs": [same[seed] for seed in sorted(same)],
                    }
                    for name, same in runs.items()
                    if same
                }
                write_figures(file, figures_of("recipe", {"flags": without_places(command.flags)}, recipes=entries))
            accuracy, seconds, speed = (run[figure] for figure in ("accuracy", "seconds", "images_per_second"))
            of = len(done) + len([one for one in missing[name] if one not in done])
            line = f"{name} seed {seed} ({len(done)} of {of}): {percent(accuracy)} · mean {percent(accuracy_of(done)['mean'])}"
            line += f" · {seconds:.2f} s · {speed or 0:,.0f} images/s"
            say(line + " · the first here: not in the warm times" * done[seed]["first"])
    except Interrupted as interruption:
        if file:
            interruption.resume = f"{program(sys.argv[0], 'bench recipe')} {shlex.join(settings.line)}"
    rows = {name: texts_of(list(same.values())) for name, same in runs.items() if same}
    if not rows:
        return
    columns = [column for column in next(iter(rows.values())) if any(row[column] != "–" for row in rows.values())]
    table = [[name, *(row[column] for column in columns)] for name, row in rows.items()]
    say("")
    print_table(environment(), "test accuracy and time", ["recipe", *columns], table, *LEGEND)
    if file:
        say(f"written: {display_path(file)}")


def check(settings: argparse.Namespace) -> dict[str, Path]:
    """The recipes' files by name; raises UsageError for what cannot be meant."""
    known = ["runs", "seed0", "json", *SHORT, *OWN]
    for word in (word for word in settings.flags if word.startswith("--")):
        flag = word.removeprefix("--").partition("=")[0]
        if flag == "folds":
            raise UsageError("bench recipe takes no --folds: it measures one training for each seed")
        if flag in NOT_TAKEN:
            advice = "recipes stand first on the line, and each run starts anew, from the seeds that --seed0 and --runs choose"
            raise UsageError(f"bench recipe takes no --{flag}: {advice}")
        if "." not in flag and flag not in known:  # training does not know the nearest of ours
            raise UsageError(f"there is no flag --{flag}.{nearest(flag, known).replace('mean ', 'mean --')}")
    if not settings.names:
        raise UsageError("which recipe? Name one or more first, as in `cifar-lit bench recipe quickstart --runs 3`")
    paths = [recipe_path(name) for name in settings.names]
    recipes = {path.stem: path for path in paths}
    if len(recipes) < len(paths):
        raise UsageError(f"two of the recipes are called alike: {', '.join(path.stem for path in paths)}")
    if settings.runs < 1 or settings.seed0 < 0:
        raise UsageError(f"--runs must be at least 1 and --seed0 at least 0, not {settings.runs} and {settings.seed0}")
    devices = parse("train", list(settings.flags)).value("trainer.devices")
    check_one_device(devices, "bench recipe measures")
    if devices is None:  # further processes would each start a measurement of their own
        settings.flags += ["--devices", "1"]
    return recipes


def conditions_of(recipe: Path, flags: Sequence[str]) -> dict[str, str]:
    """What runs must have in common to count as one measurement: a digest for each kind of thing."""
    command, where = parse("train", list(flags)), environment()
    code = [path for pattern in CODE for path in sorted(Path(cifar_lit.__file__).parent.glob(pattern))]
    parts = {
        "recipe": [repr(recipe_settings(recipe))],  # not its header, which these very figures are written into
        "flags": [*command.flags, *(Path(path).expanduser().read_text() for path in command.configs)],
        "versions": [str(where["versions"])],
        "code": [path.read_text() for path in code],
        "machine": [str(where[name]) for name in ("cpu", "bf16", "threads", "gpu")],
    }
    return {name: hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12] for name, texts in parts.items()}


def read_runs(file: Path | None, conditions: Mapping[str, Mapping[str, str]]) -> dict[str, Runs]:
    """The finished runs that a file holds, by recipe; raises UsageError when they are of something else."""
    if not file or not file.exists():
        return {}
    place = display_path(file)
    try:
        figures = json.loads(file.read_text())
    except (OSError, ValueError):
        figures = None
    if not isinstance(figures, dict) or figures.get("bench") != "recipe":
        raise UsageError(f"{place} is there already and holds no figures of `bench recipe`: name another --json")
    for name, entry in figures["recipes"].items():
        if name not in conditions:
            raise UsageError(
                f"{place} holds runs of {name}, which is not measured now: name another --json, or delete {place}"
            )
        if differing := " and ".join(
            part for part, own in conditions[name].items() if entry["settings"].get(part) != own
        ):
            raise UsageError(
                f"{place} holds runs of {name} with other {differing}: name another --json, or delete {place}"
            )
    return {name: {run["seed"]: run for run in entry["runs"]} for name, entry in figures["recipes"].items()}


def run_once(
    recipe: str, flags: Sequence[str], seed: int, logs: str | None, cold: bool, *callbacks: Callback
) -> dict[str, Any]:
    """Trains and tests a recipe with one seed, as `train` does in this process; what it prints is not shown.

    Args:
        flags: further ones of training.
        logs: folder for run folders, None for one that is deleted.
        cold: whether this is the process's first run, of which the time since the process started is of interest.
        callbacks: of the Trainer, beside the run's own.

    Returns:
        What `metrics.json` says of it, by plain names, and seconds from the process's start to the tested net (None if not
        cold), and peak memory of the process and of the GPU (None without) in MB.

    Raises:
        What the command raises, and Failure when there was no test.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with nullcontext(logs) if logs else tempfile.TemporaryDirectory(prefix="cifar-lit-bench-") as name:
        folder = Path(name).expanduser()
        before = set(folder.glob("*"))
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
            TrainingCLI(
                parse("train", ["--recipe", recipe, *flags, "--seed", str(seed), "--logs", str(folder)]), *callbacks
            )
        age = process_age() if cold else None
        every = map(read_metrics, set(folder.glob("*")) - before)
        metrics = next(
            (one for one in every if one.get("seed") == seed and one.get("test") and one.get("train_seconds")), None
        )
    if metrics is None:
        raise Failure(f"{recipe} with seed {seed} ended without a test: leave flags out that cut a run short")
    gc.collect()  # net and Trainer refer to each other, and would keep the device's memory until the next collection
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)  # else in KiB
    on_gpu = torch.cuda.is_available() and metrics["accelerator"] == "gpu"
    return {
        "seed": seed,
        "date": time.strftime("%Y-%m-%d"),
        **{name: metrics[name] for name in ("dataset", "accelerator", "precision", "parameters", "images_per_second")},
        **{name: metrics["test"][name] for name in ("accuracy", "loss", "balanced_accuracy", "macro_f1")},
        "views": metrics["test"].get("tta"),
        "seconds": metrics["train_seconds"],
        "cold_seconds": None if age is None else round(age, 2),
        "memory_mb": round(peak / 1e6),
        "device_memory_mb": round(torch.cuda.max_memory_allocated() / 1e6) if on_gpu else None,
    }


def process_age() -> float | None:
    """Seconds since this process started, to a hundredth; None where the system does not tell (Linux does, in /proc)."""
    try:
        # the 22nd field of proc(5)'s stat, in clock ticks since boot; the second may hold spaces and ends with a bracket
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return None


def accuracy_of(runs: Runs) -> dict[str, Any]:
    """Mean, deviation and interval of the accuracy over seeds."""
    return mean_interval([runs[seed]["accuracy"] for seed in sorted(runs)])


def percent(value: float) -> str:
    """A fraction as 94.05 %."""
    return f"{100 * value:.2f} %"


def texts_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What a recipe's runs came to, by the names of their columns; – for what there is not.

    Accuracy is over all runs. Times are over the warm ones: not over those that were their process's first of this recipe, in
    which code is loaded and kernels are compiled or captured, unless there are no others.
    """
    warm = [run for run in runs if not run["first"]] or runs
    views = [run["views"] for run in runs if run["views"]]
    cold = [run["cold_seconds"] for run in runs if run["cold_seconds"] is not None]
    device = max(run["device_memory_mb"] or 0 for run in runs)
    return {
        "test accuracy": mean_text([run["accuracy"] for run in runs]),
        "with views": f"{mean_text([one['accuracy'] for one in views])}, {views[0]['views']}" if views else "–",
        "training": spread_text(spread(run["seconds"] for run in warm), "s"),
        "start to end": spread_text(spread(cold), "s") if cold else "–",
        "speed": spread_text(spread(run["images_per_second"] or 0.0 for run in warm), "images/s"),
        "peak memory": f"{max(run['memory_mb'] for run in runs):,} MB"
        + (f" + {device:,} MB on the device" if device else ""),
    }


def mean_text(fractions: Sequence[float]) -> str:
    """A mean with its standard deviation, n and from FEW values on its interval: `91.69 ± 0.17 % (n = 20; 91.61 … 91.77)`."""
    mean = mean_interval(fractions)
    deviation = "" if mean["std"] is None else f" ± {100 * mean['std']:.2f}"
    interval = f"; {100 * mean['low']:.2f} … {100 * mean['high']:.2f}" if mean["n"] >= FEW else ""
    return f"{100 * mean['mean']:.2f}{deviation} % (n = {mean['n']}{interval})"
