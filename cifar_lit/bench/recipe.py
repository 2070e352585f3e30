"""`cifar-lit bench recipe`: recipes trained and tested with many seeds, as means with their intervals, times and memory."""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import re
import resource
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

import cifar_lit
from cifar_lit.bench.commands import PassingParser
from cifar_lit.bench.process import without_places
from cifar_lit.bench.report import environment, footer, make_parent, show, spread, spread_text, write_figures
from cifar_lit.cli.console import say
from cifar_lit.cli.fit import TrainingCLI, program
from cifar_lit.cli.flags import LOGS, OWN, SHORT, parse, recipe_path
from cifar_lit.cli.quiet import catch_signals
from cifar_lit.data.sources import SOURCES
from cifar_lit.errors import Failure, UsageError, nearest
from cifar_lit.runs.compare import mean_interval
from cifar_lit.runs.run_folder import display_path, read_metrics
from cifar_lit.training.callbacks import Interrupted

WHAT = "seeds of recipes: test accuracy with its interval, warm and cold time, memory"
UNFIT = {
    "seed": "--seed0 and --runs choose the seeds",
    "seed_everything": "--seed0 and --runs choose the seeds",
    "recipe": "recipes are named without a flag, first on the line",
    "resume": "the same command again goes on by itself",
    "ckpt_path": "every run starts anew",
}
CODE = ("data", "models", "training")  # the folders that a result depends on
SHARED = (
    "The runs share one process, and the images, which are decoded and held once. Each has its own net, Trainer and run folder, "
    "and draws initial weights, order and augmentation from its seed."
)
Runs = dict[str, dict[int, dict[str, Any]]]  # by recipe and seed
Fingerprints = Mapping[str, Mapping[str, str]]  # by recipe
LEGEND = (
    "± is the standard deviation over seeds; train s, with its quartiles, is the whole fit with its validations, warm",
    "cold s is from the process's start to the tested net; peak MB is of the process, with all runs before",
)


def main(argv: list[str]) -> None:
    """Runs `bench recipe NAME … [flags]`.

    Raises UsageError, Failure, Interrupted and what a training raises; what is finished by then is kept on disk.
    """
    names, options, flags = parse_line(argv)
    catch_signals()
    logs = parse("train", flags).logs
    where = environment()
    settings = {recipe_path(name).stem: fingerprint(name, flags, where) for name in names}
    temporary = Path(logs or LOGS) / f"bench-recipe-{_digest(json.dumps(settings))}.json"
    file = Path(options.json) if options.json else temporary
    seeds = range(options.seed0, options.seed0 + options.runs)
    with locked(file):
        runs = read_runs(file, settings)
        try:
            for name, run, total in _missing_runs(names, seeds, flags, logs, runs, file):
                runs[name][run["seed"]] = run
                figures = _figures(runs, settings, flags, where)
                write_figures(file, figures)  # whole after each run, so that a stopped measurement goes on where it was
                say(_progress(name, run, runs[name], total))
        except Interrupted as interruption:
            interruption.resume = f"{program(sys.argv[0], 'bench recipe')} {shlex.join(argv)}"
            raise
        figures = _figures(runs, settings, flags, where)
        temporary.unlink(missing_ok=True)
    say("")
    print_summary(figures["recipes"])
    say("", SHARED, footer(figures), *([f"written: {display_path(file)}"] if options.json else []))


def _figures(runs: Runs, settings: Fingerprints, flags: Sequence[str], where: dict[str, Any]) -> dict[str, Any]:
    recipes = {name: [by_seed[seed] for seed in sorted(by_seed)] for name, by_seed in runs.items() if by_seed}
    return {
        "bench": "recipe",
        "settings": {"flags": without_places(parse("train", list(flags)).flags)},
        "environment": where,
        "shared": SHARED,
        "recipes": {name: {**summary(same), "settings": settings[name], "runs": same} for name, same in recipes.items()},
    }


def parse_line(argv: list[str]) -> tuple[list[str], argparse.Namespace, list[str]]:
    """Recipes, flags of the measurement and those of training; raises UsageError for what cannot be meant."""
    going_on = "A measurement that was stopped goes on when the same line is typed again."
    parser = PassingParser("cifar-lit bench recipe", f"{WHAT}. {going_on}")
    parser.usage = "%(prog)s NAME [NAME …] [flags] [any flag of training]"
    parser.add_argument("--runs", type=int, default=3, help="seeds of each recipe (3)")
    parser.add_argument("--seed0", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--json", metavar="FILE", help="write all figures there; runs that it holds already are not made again")
    if "-h" in argv or "--help" in argv:
        parser.print_help()
        raise SystemExit(0)
    count = next((place for place, word in enumerate(argv) if word.startswith("-")), len(argv))
    names = argv[:count]
    options, flags = parser.parse_known_args(argv[count:])
    known = ["runs", "seed0", "json", *SHORT, *OWN]
    for word in flags:
        flag = word.removeprefix("--").partition("=")[0]
        if flag in UNFIT and word.startswith("--"):
            raise UsageError(f"bench recipe takes no --{flag}: {UNFIT[flag]}")
        if word.startswith("--") and "." not in flag and flag not in known:  # training does not know the nearest of ours
            raise UsageError(f"there is no flag --{flag}.{nearest(flag, known).replace('mean ', 'mean --')}")
    if not names:
        raise UsageError("which recipe? Name one or more first, as in `cifar-lit bench recipe quickstart --runs 3`")
    stems = [recipe_path(name).stem for name in names]
    if len(set(stems)) < len(stems):
        raise UsageError(f"two of the recipes are called alike: {', '.join(stems)}")
    if options.runs < 1:
        raise UsageError(f"--runs must be at least 1, not {options.runs}")
    if options.seed0 < 0:
        raise UsageError(f"--seed0 must be 0 or more, not {options.seed0}")
    if options.json:
        make_parent(Path(options.json))
    devices = parse("train", flags).value("trainer.devices")
    if devices is None:  # further processes would each start a measurement of their own
        flags = [*flags, "--devices", "1"]
    elif not re.fullmatch(r"1|\d+,|\[\d+,?\]", devices):
        raise UsageError(f"bench recipe measures on one device, not on --devices {devices}: use 1, or name one as [0]")
    return names, options, flags


# ---- runs that are finished are kept


def fingerprint(recipe: str, flags: Sequence[str], where: Mapping[str, Any]) -> dict[str, str]:
    """What runs must have in common to count as one measurement: a digest for each kind of thing; `where`: `environment()`."""
    command = parse("train", list(flags))
    package = Path(cifar_lit.__file__).parent
    return {
        "recipe": _digest(recipe_path(recipe).read_text()),
        "flags": _digest(*command.flags),
        "configurations": _digest(*(Path(path).expanduser().read_text() for path in command.configs)),
        "versions": _digest(*(f"{name} {version}" for name, version in where["versions"].items())),
        "code": _digest(*(path.read_text() for folder in CODE for path in sorted((package / folder).rglob("*.py")))),
        "machine": _digest(*(str(where[name]) for name in ("cpu", "threads", "gpu"))),
    }


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Raises Failure where another process measures into the same file, or it cannot be written."""
    place = display_path(file)
    lock = FileLock(file.with_name(file.name + ".lock"))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise Failure(f"another process is writing {place}: wait until it ends, or name another --json") from None
    except OSError as error:
        raise Failure(f"cannot write {place}: {error.strerror}. Name another file with --json.") from None
    try:
        yield
    finally:
        lock.release()
        Path(lock.lock_file).unlink(missing_ok=True)


def read_runs(file: Path, settings: Fingerprints) -> Runs:
    """The finished runs that a file holds, if it is there; raises UsageError when they are of something else."""
    runs: Runs = {name: {} for name in settings}
    if not file.exists():
        return runs
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        content = None
    place = display_path(file)
    if not isinstance(content, dict) or content.get("bench") != "recipe":
        raise UsageError(f"{place} is there already and holds no figures of `bench recipe`: name another --json")
    way_out = f"name another --json, or delete {place}"
    for name, entry in content["recipes"].items():
        if name not in settings:
            raise UsageError(f"{place} holds runs of {name}, which is not measured now: {way_out}")
        if differing := " and ".join(part for part, own in settings[name].items() if entry["settings"].get(part) != own):
            raise UsageError(f"{place} holds runs of {name} with other {differing}: {way_out}")
        runs[name] = {run["seed"]: run for run in entry["runs"]}
    return runs


# ---- training


def _missing_runs(
    names: Sequence[str], seeds: Sequence[int], flags: Sequence[str], logs: str | None, runs: Runs, file: Path
) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Makes the runs that there are not yet, each with its recipe's name and how many there are to be of it."""
    cold = True
    with images_held():
        for recipe in names:
            name = recipe_path(recipe).stem
            missing = [seed for seed in seeds if seed not in runs[name]]
            done = len(runs[name])
            if done:
                say(f"{name}: {done} runs are done already (in {display_path(file)}); {len(missing)} to go")
            for place, seed in enumerate(missing):
                yield name, {**run_once(recipe, flags, seed, logs, cold), "first": place == 0}, done + len(missing)
                cold = False


def _progress(name: str, run: Mapping[str, Any], runs: Mapping[int, Mapping[str, Any]], total: int) -> str:
    mean = statistics.fmean(other["accuracy"] for other in runs.values())
    line = f"{name} seed {run['seed']} ({len(runs)} of {total}): {percent(run['accuracy'])} · mean {percent(mean)}"
    line += f" · {run['seconds']:.2f} s · {run['images_per_second'] or 0:,.0f} images/s"
    return line + " · the first here: not in the warm times" * run["first"]


@contextmanager
def images_held() -> Iterator[None]:
    """Within, each data set that is asked for again is handed over as it was loaded the first time."""
    before = dict(SOURCES)
    SOURCES.update({name: replace(source, load=cache(source.load)) for name, source in before.items()})
    try:
        yield
    finally:
        SOURCES.update(before)


def run_once(recipe: str, flags: Sequence[str], seed: int, logs: str | None, cold: bool) -> dict[str, Any]:
    """Trains and tests a recipe with one seed, as `train` does in this process; what it prints is not shown.

    Args:
        recipe: a name or path.
        flags: further ones of training.
        seed: of weights, order and augmentation.
        logs: folder for run folders, None for one that is deleted.
        cold: whether this is the process's first run, of which the time since the process started is of interest.

    Returns:
        seed, data set, accelerator, precision, parameters, test accuracy and loss, views (None without), seconds of the fit,
        training images a second, seconds from the process's start to the tested net (None if not cold), and peak memory of
        the process and of the GPU (None without) in MB.

    Raises:
        What the command raises, and Failure when there was no test.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with nullcontext(logs) if logs else tempfile.TemporaryDirectory(prefix="cifar-lit-bench-") as name:
        folder = Path(name).expanduser()
        before = set(folder.glob("*"))
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
            TrainingCLI(parse("train", ["--recipe", recipe, *flags, "--seed", str(seed), "--logs", str(folder)]))
        age = process_age() if cold else None
        every = map(read_metrics, set(folder.glob("*")) - before)
        metrics = next((one for one in every if one.get("seed") == seed and one.get("test") and one.get("train_seconds")), None)
    if metrics is None:
        raise Failure(f"{recipe} with seed {seed} ended without a test: leave flags out that cut a run short")
    gc.collect()  # net and Trainer refer to each other, and would keep the device's memory until the next collection
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)  # else in KiB
    on_gpu = torch.cuda.is_available() and metrics["accelerator"] == "gpu"
    return {
        "seed": seed,
        **{name: metrics[name] for name in ("dataset", "accelerator", "precision", "parameters")},
        "accuracy": metrics["test"]["accuracy"],
        "loss": metrics["test"]["loss"],
        "views": metrics["test"].get("tta"),
        "seconds": metrics["train_seconds"],
        "images_per_second": metrics["images_per_second"],
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
    except (OSError, AttributeError, ValueError, IndexError):
        return None


# ---- what the runs come to


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Accuracy over all runs, times over the warm ones.

    Args:
        runs: as `run_once` returns them, with `first` for those that were their process's first of this recipe, in which
            code is loaded and kernels are compiled or captured; their times count only where there are no others.
    """
    warm = [run for run in runs if not run["first"]]
    timed = warm or runs
    views = [run["views"] for run in runs if run["views"]]
    cold = [run["cold_seconds"] for run in runs if run["cold_seconds"] is not None]
    return {
        **{name: runs[0][name] for name in ("dataset", "accelerator", "precision", "parameters")},
        "accuracy": mean_interval([run["accuracy"] for run in runs]),
        "views": {"views": views[0]["views"], **mean_interval([view["accuracy"] for view in views])} if views else None,
        "warm": bool(warm),
        "seconds": spread(run["seconds"] for run in timed),
        "images_per_second": spread(run["images_per_second"] or 0.0 for run in timed),
        "cold_seconds": spread(cold) if cold else None,
        "memory_mb": max(run["memory_mb"] for run in runs),
        "device_memory_mb": max((run["device_memory_mb"] for run in runs if run["device_memory_mb"] is not None), default=None),
    }


def percent(value: float) -> str:
    """A fraction as 94.05 %."""
    return f"{100 * value:.2f} %"


def mean_text(mean: Mapping[str, Any]) -> str:
    """A mean of fractions with the runs' deviation: 94.05 % ± 0.14."""
    return percent(mean["mean"]) + (f" ± {100 * mean['std']:.2f}" if mean["std"] is not None else "")


def memory_text(entry: Mapping[str, Any]) -> str:
    """Peak memory in MB, the accelerator's behind a plus."""
    device = entry["device_memory_mb"]
    return f"{entry['memory_mb']:,}" + (f" + {device:,} on the device" if device is not None else "")


def print_summary(recipes: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints a row for each recipe."""
    rows, lines = [], list(LEGEND)
    for name, entry in recipes.items():
        accuracy, views, cold = (entry[part] for part in ("accuracy", "views", "cold_seconds"))
        row = [name, str(accuracy["n"]), mean_text(accuracy)]
        row.append(f"{100 * accuracy['low']:.2f} … {100 * accuracy['high']:.2f}" if accuracy["low"] is not None else "–")
        row.append(f"{mean_text(views)} ({views['views']})" if views else "–")
        row += [spread_text(entry["seconds"], ",.2f"), spread_text(cold, ",.1f") if cold else "–"]
        rows.append([*row, f"{entry['images_per_second']['median']:,.0f}", memory_text(entry)])
        if not entry["warm"]:
            lines.append(f"{name}: no run was warm, the times are those of first runs")
    columns = ["recipe", "n", "test accuracy", "95 % of the mean", "with views", "train s", "cold s", "images/s", "peak MB"]
    if all(row[4] == "–" for row in rows):
        rows, columns = [[*row[:4], *row[5:]] for row in rows], [*columns[:4], *columns[5:]]
    show("test accuracy and time", columns, rows, *lines)
