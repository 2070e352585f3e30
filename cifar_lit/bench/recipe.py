"""`cifar-lit bench recipe`: train recipes with several seeds, and report accuracy, time and memory."""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
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
from cifar_lit.stats import SHARE, limits_text, mean_interval
from cifar_lit.text import say
from cifar_lit.training.orderly_stop import Interrupted

WHAT = (
    "Train recipes with several seeds: test accuracy with its interval, time and memory. With --json, a stopped "
    "measurement resumes if the same command is run again. Other flags are passed to the trainings."
)
NOT_TAKEN = ("seed", "seed_everything", "recipe", "resume", "ckpt_path", "folds")  # flags of trainings
# Results depend on these files.
CODE = ("data/**/*.py", "models/**/*.py", "training/**/*.py", "cli/fit.py", "hardware.py", "train.py")
LEGEND = (
    f"± is the standard deviation over n seeds, with a 95 % confidence interval (Student's t) where n >= {FEW}",
    "training time: fit with validation, without the checkpoints of its last epoch",
    "training and test: training time and the test of the plain images and, with TTA, of their views",
    "times and speed: median (quartiles; range if n < 4) without the first run of each process if there are others",
    "start to result: from process start to the test result; peak memory: of the process, including earlier runs",
    "The runs share one process and the decoded images. Each run draws its random numbers from its own seed.",
)
Runs = dict[int, dict[str, Any]]  # results of `run_once` by seed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.set_defaults(flags=[])
    parser.add_argument("names", nargs="*", metavar="NAME", help="recipes or YAML files, before all flags")
    parser.add_argument("--runs", type=int, default=3, help="number of seeds; runs in the --json file count")
    parser.add_argument("--seed0", type=int, default=0, help="the first seed")


def run(settings: argparse.Namespace) -> None:
    """Measure and report. Finished runs are in the --json file even if the measurement is stopped."""
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
            say(f"{name}: {len(done)} runs are in {display_path(Path(settings.json))}, {left} to go")
    total = sum(map(len, missing.values()))
    progress = Progress(total, "training")
    say(f"{total} trainings, one after the other; the remaining time is shown after the first steps")
    trained = 0
    try:
        for name, seed in [(recipe, seed) for recipe in recipes for seed in missing[recipe]]:
            done = runs[name]
            callback = StepProgress(progress, trained)
            run = run_once(str(recipes[name]), settings.flags, seed, command.logs, not trained, callback)
            done[seed] = run | {"first": seed == missing[name][0]}
            trained += 1
            if file:
                entries = {
                    recipe: {
                        "settings": conditions[recipe],
                        "accuracy": accuracy_of(finished),
                        "runs": [finished[each] for each in sorted(finished)],
                    }
                    for recipe, finished in runs.items()
                    if finished
                }
                write_figures(file, figures_of("recipe", {"flags": without_places(command.flags)}, recipes=entries))
            goal = len(done.keys() | missing[name])
            mean = f"mean {100 * accuracy_of(done)['mean']:.2f} %"
            line = f"{name} seed {seed} ({len(done)} of {goal}): {100 * run['accuracy']:.2f} % · {mean}"
            line += f" · {run['seconds']:.2f} s · {run['images_per_second'] or 0:,.0f} images/s"
            say(line + " · first run: not in the times" * (done[seed]["first"] and goal > 1))
    except Interrupted as interruption:
        if file:
            interruption.resume = f"{program(sys.argv[0], 'bench recipe')} {shlex.join(settings.line)}"
    rows = {name: texts_of(list(finished.values())) for name, finished in runs.items() if finished}
    if not rows:
        return
    columns = [column for column in next(iter(rows.values())) if any(row[column] != "–" for row in rows.values())]
    table = [[name, *(row[column] for column in columns)] for name, row in rows.items()]
    say("")
    print_table(environment(), "test accuracy and time", ["recipe", *columns], table, *LEGEND)
    if file:
        say(f"wrote {display_path(file)}")


def check(settings: argparse.Namespace) -> dict[str, Path]:
    """Return the recipe files by name; raise UsageError for invalid settings."""
    valid = ["runs", "seed0", "json", *SHORT, *OWN]
    for word in (word for word in settings.flags if word.startswith("--")):
        flag = word.removeprefix("--").partition("=")[0]
        if flag in NOT_TAKEN:
            advice = "it trains each seed anew. Name recipes before all flags; set the seeds with --seed0 and --runs"
            raise UsageError(f"bench recipe takes no --{flag}: {advice}")
        if "." not in flag and flag not in valid:  # the training would not suggest our flags
            raise UsageError(f"there is no flag --{flag}.{nearest(flag, valid).replace('mean ', 'mean --')}")
    if not settings.names:
        raise UsageError("bench recipe needs a recipe, as in `cifar-lit bench recipe quickstart --runs 3`")
    paths = [recipe_path(name) for name in settings.names]
    recipes = {path.stem: path for path in paths}
    if len(recipes) < len(paths):
        raise UsageError(f"two recipes have the same name: {', '.join(path.stem for path in paths)}")
    if settings.runs < 1 or settings.seed0 < 0:
        raise UsageError(f"--runs must be at least 1 and --seed0 at least 0, not {settings.runs} and {settings.seed0}")
    devices = parse("train", list(settings.flags)).value("trainer.devices")
    check_one_device(devices, "bench recipe measures")
    if devices is None:  # each process of several would start its own measurement
        settings.flags += ["--devices", "1"]
    return recipes


def conditions_of(recipe: Path, flags: Sequence[str]) -> dict[str, str]:
    """Return digests of the settings, code and hardware, which must be the same in all runs of a measurement."""
    command, where = parse("train", list(flags)), environment()
    code = [path for pattern in CODE for path in sorted(Path(cifar_lit.__file__).parent.glob(pattern))]
    parts = {
        "recipe": [repr(recipe_settings(recipe))],  # without its header, which contains the results
        "flags": [*command.flags, *(Path(path).expanduser().read_text() for path in command.configs)],
        "versions": [str(where["versions"])],
        "code": [path.read_text() for path in code],
        "machine": [str(where[name]) for name in ("cpu", "bf16", "threads", "gpu")],
    }
    return {name: hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12] for name, texts in parts.items()}


def read_runs(file: Path | None, conditions: Mapping[str, Mapping[str, str]]) -> dict[str, Runs]:
    """Return the finished runs in a file by recipe; raise UsageError if they belong to another measurement."""
    if not file or not file.exists():
        return {}
    place = display_path(file)
    try:
        figures = json.loads(file.read_text())
    except (OSError, ValueError):
        figures = None
    if not isinstance(figures, dict) or figures.get("bench") != "recipe":
        raise UsageError(f"{place} exists and has no results of `bench recipe`: name another --json file")
    remedy = "name another --json file, or delete this one"
    for name, entry in figures["recipes"].items():
        if name not in conditions:
            raise UsageError(f"{place} has runs of {name}, which is not measured now: {remedy}")
        differing = [part for part, digest in conditions[name].items() if entry["settings"].get(part) != digest]
        if differing:
            raise UsageError(f"{place} has runs of {name} with other {' and '.join(differing)}: {remedy}")
    return {name: {run["seed"]: run for run in entry["runs"]} for name, entry in figures["recipes"].items()}


def run_once(
    recipe: str, flags: Sequence[str], seed: int, logs: str | None, cold: bool, *callbacks: Callback
) -> dict[str, Any]:
    """Train and test a recipe with one seed in this process, without its output.

    Args:
        flags: further flags of `train`.
        logs: folder for run folders, None for a temporary one.
        cold: whether to measure the time since the start of this process.
        callbacks: added to the callbacks of the run.

    Returns:
        Values of metrics.json. `cold_seconds`: seconds from process start to the test result, None if not `cold`.
        `memory_mb`, `device_memory_mb`: peak memory of the process and of the GPU (None without one).

    Raises:
        Failure: there was no test.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with nullcontext(logs) if logs else tempfile.TemporaryDirectory(prefix="cifar-lit-bench-") as name:
        folder = Path(name).expanduser()
        before = set(folder.glob("*"))
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
            argv = ["--recipe", recipe, *flags, "--seed", str(seed), "--logs", str(folder)]
            TrainingCLI(parse("train", argv), *callbacks)
        age = process_age() if cold else None
        new_runs = map(read_metrics, set(folder.glob("*")) - before)
        trained = (run for run in new_runs if run.get("seed") == seed and run.get("test") and run.get("train_seconds"))
        metrics = next(trained, None)
    if metrics is None:
        raise Failure(f"{recipe} with seed {seed} ended without a test: leave out flags that shorten a run")
    gc.collect()  # net and Trainer refer to each other and would keep device memory
    peak = peak_memory()
    on_gpu = torch.cuda.is_available() and metrics["accelerator"] == "gpu"
    return {
        "seed": seed,
        "date": time.strftime("%Y-%m-%d"),
        **{name: metrics[name] for name in ("dataset", "accelerator", "precision", "parameters", "images_per_second")},
        **{name: metrics["test"][name] for name in ("accuracy", "loss", "balanced_accuracy", "macro_f1")},
        "views": metrics["test"].get("tta"),
        "seconds": metrics["train_seconds"],
        "test_seconds": metrics["test_seconds"],
        "cold_seconds": None if age is None else round(age, 2),
        "memory_mb": round(peak / 1e6),
        "device_memory_mb": round(torch.cuda.max_memory_allocated() / 1e6) if on_gpu else None,
    }


def peak_memory() -> int:
    """Return the most bytes of memory that this process has had."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def process_age() -> float | None:
    """Return the seconds since the start of this process, None on systems other than Linux."""
    if sys.platform != "linux":
        return None
    try:
        # Field 22 of proc(5)'s stat: clock ticks since boot. Field 2 may contain spaces and ends with a bracket.
        ticks = int(Path("/proc/self/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return None


def accuracy_of(runs: Runs) -> dict[str, Any]:
    """Return mean, standard deviation and interval of the accuracy over seeds."""
    return mean_interval([runs[seed]["accuracy"] for seed in sorted(runs)], SHARE)


def texts_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the results of a recipe's runs by column, – for missing values.

    The accuracy is over all runs. If there are several runs, times leave out the first run in each process, which loads
    code and compiles or captures kernels.
    """
    warm = [run for run in runs if not run["first"]] or runs
    views = [run["views"] for run in runs if run["views"]]
    # Files of earlier versions have no time of the test.
    both = [run["seconds"] + run["test_seconds"] for run in warm if "test_seconds" in run]
    cold = [run["cold_seconds"] for run in runs if run["cold_seconds"] is not None]
    device = max(run["device_memory_mb"] or 0 for run in runs)
    memory = f"{max(run['memory_mb'] for run in runs):,} MB"
    return {
        "test accuracy": mean_text([run["accuracy"] for run in runs]),
        "with TTA": f"{mean_text([one['accuracy'] for one in views])}, {views[0]['views']}" if views else "–",
        "training time": spread_text(spread(run["seconds"] for run in warm), "s"),
        "training and test": spread_text(spread(both), "s") if both else "–",
        "start to result": spread_text(spread(cold), "s") if cold else "–",
        "speed": spread_text(spread(run["images_per_second"] or 0.0 for run in warm), "images/s"),
        "peak memory": memory + (f" + {device:,} MB on the device" if device else ""),
    }


def mean_text(fractions: Sequence[float]) -> str:
    """Return the mean with standard deviation, n and interval: `91.69 ± 0.17 % (n = 20; 91.61 … 91.77)`."""
    mean = mean_interval(fractions, SHARE)
    deviation = "" if mean["std"] is None else f" ± {100 * mean['std']:.2f}"
    limits = limits_text(mean, ".2f", 0.01) if mean["n"] >= FEW else ""
    interval = f"; {limits}" if limits else ""
    return f"{100 * mean['mean']:.2f}{deviation} % (n = {mean['n']}{interval})"
