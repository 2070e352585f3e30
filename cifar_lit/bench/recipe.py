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

import cifar_lit
from cifar_lit.bench.process import without_places
from cifar_lit.bench.report import environment, figures_of, publish, spread, spread_text, write_figures
from cifar_lit.cli.console import say
from cifar_lit.cli.fit import TrainingCLI, program
from cifar_lit.cli.flags import OWN, SHORT, parse, recipe_path
from cifar_lit.cli.quiet import catch_signals
from cifar_lit.data.sources import SOURCES
from cifar_lit.errors import Failure, UsageError, nearest
from cifar_lit.runs.compare import mean_interval
from cifar_lit.runs.run_folder import display_path, read_metrics
from cifar_lit.training.callbacks import Interrupted

WHAT = (
    "Seeds of recipes: test accuracy with its interval, warm and cold time, memory. With --json, a measurement that was stopped "
    "goes on when the same line is typed again. What is not listed here goes to the training."
)
NOT_TAKEN = {
    **dict.fromkeys(("seed", "seed_everything"), "--seed0 and --runs choose the seeds"),
    "recipe": "recipes are named without a flag, first on the line",
    **dict.fromkeys(("resume", "ckpt_path"), "every run starts anew"),
}
CODE = ("data", "models", "training")  # the folders that a result depends on
SHARED = (
    "The runs share one process, and the images, which are decoded and held once. Each has its own net, Trainer and run folder, "
    "and draws initial weights, order and augmentation from its seed."
)
LEGEND = (
    "± is the standard deviation over seeds; train s, with its quartiles, is the whole fit with its validations, warm",
    "cold s is from the process's start to the tested net; peak MB is of the process, with all runs before",
)
Runs = dict[str, dict[int, dict[str, Any]]]  # by recipe and seed


def add_arguments(parser: Any) -> None:
    """The flags of this measurement."""
    parser.trains = parser.names = True
    parser.add_argument("--runs", type=int, default=3, help="seeds of each recipe; those that the --json FILE holds are kept")
    parser.add_argument("--seed0", type=int, default=0, help="the first of them")


def run(settings: argparse.Namespace) -> None:
    """Measures and reports; raises Interrupted and what a training raises: what is finished by then is in the --json file."""
    recipes = check(settings)
    catch_signals()
    where = environment()
    conditions = {name: conditions_of(path, settings.flags, where) for name, path in recipes.items()}
    file = Path(settings.json) if settings.json else None
    runs = read_runs(file, conditions) if file and file.exists() else {name: {} for name in recipes}
    command = parse("train", list(settings.flags))

    def figures() -> dict[str, Any]:
        entries = {
            name: {**summary(same), "settings": conditions[name], "runs": same}
            for name in recipes
            if (same := [runs[name][seed] for seed in sorted(runs[name])])
        }
        return figures_of("recipe", {"flags": without_places(command.flags)}, shared=SHARED, recipes=entries)

    cold = True
    with images_held():
        for name, path in recipes.items():
            missing = [seed for seed in range(settings.seed0, settings.seed0 + settings.runs) if seed not in runs[name]]
            total = len(runs[name]) + len(missing)
            if file and runs[name]:
                say(f"{name}: {len(runs[name])} runs are done already (in {display_path(file)}); {len(missing)} to go")
            for seed in missing:
                try:
                    done = run_once(str(path), settings.flags, seed, command.logs, cold)
                except Interrupted as interruption:
                    if file:
                        interruption.resume = f"{program(sys.argv[0], 'bench recipe')} {shlex.join(settings.line)}"
                    raise
                cold, done["first"] = False, seed == missing[0]
                runs[name][seed] = done
                if file:
                    write_figures(file, figures())
                mean = percent(mean_interval([other["accuracy"] for other in runs[name].values()])["mean"])
                line = f"{name} seed {seed} ({len(runs[name])} of {total}): {percent(done['accuracy'])} · mean {mean}"
                line += f" · {done['seconds']:.2f} s · {done['images_per_second'] or 0:,.0f} images/s"
                say(line + " · the first here: not in the warm times" * done["first"])
    say("")
    report(figures(), settings.json)


def check(settings: argparse.Namespace) -> dict[str, Path]:
    """The recipes' files by name; raises UsageError for what cannot be meant."""
    known = ["runs", "seed0", "json", *SHORT, *OWN]
    for word in settings.flags:
        flag = word.removeprefix("--").partition("=")[0]
        if flag in NOT_TAKEN and word.startswith("--"):
            raise UsageError(f"bench recipe takes no --{flag}: {NOT_TAKEN[flag]}")
        if word.startswith("--") and "." not in flag and flag not in known:  # training does not know the nearest of ours
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
    if devices is None:  # further processes would each start a measurement of their own
        settings.flags += ["--devices", "1"]
    elif not re.fullmatch(r"1|\d+,|\[\d+,?\]", devices):
        raise UsageError(f"bench recipe measures on one device, not on --devices {devices}: use 1, or name one as [0]")
    return recipes


def conditions_of(recipe: Path, flags: Sequence[str], where: Mapping[str, Any]) -> dict[str, str]:
    """What runs must have in common to count as one measurement: a digest for each kind of thing; `where`: `environment()`."""
    command = parse("train", list(flags))
    package = Path(cifar_lit.__file__).parent
    texts = {
        "recipe": [recipe.read_text()],
        "flags": [*command.flags, *(Path(path).expanduser().read_text() for path in command.configs)],
        "versions": [f"{name} {version}" for name, version in where["versions"].items()],
        "code": [path.read_text() for folder in CODE for path in sorted((package / folder).rglob("*.py"))],
        "machine": [str(where[name]) for name in ("cpu", "threads", "gpu")],
    }
    return {name: hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12] for name, parts in texts.items()}


def read_runs(file: Path, conditions: Mapping[str, Mapping[str, str]]) -> Runs:
    """The finished runs that a file holds; raises UsageError when they are of something else."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        content = None
    place = display_path(file)
    if not isinstance(content, dict) or content.get("bench") != "recipe":
        raise UsageError(f"{place} is there already and holds no figures of `bench recipe`: name another --json")
    runs: Runs = {name: {} for name in conditions}
    for name, entry in content["recipes"].items():
        if name not in conditions:
            raise UsageError(f"{place} holds runs of {name}, which is not measured now: name another --json, or delete {place}")
        if differing := " and ".join(part for part, own in conditions[name].items() if entry["settings"].get(part) != own):
            raise UsageError(f"{place} holds runs of {name} with other {differing}: name another --json, or delete {place}")
        runs[name] = {run["seed"]: run for run in entry["runs"]}
    return runs


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
        **{name: metrics[name] for name in ("dataset", "accelerator", "precision", "parameters", "images_per_second")},
        **{name: metrics["test"][name] for name in ("accuracy", "loss")},
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


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Accuracy over all runs, times over the warm ones.

    Args:
        runs: as `run_once` returns them, with `first` for those that were their process's first of this recipe, in which
            code is loaded and kernels are compiled or captured; their times count only where there are no others.
    """
    warm = [run for run in runs if not run["first"]]
    views = [run["views"] for run in runs if run["views"]]
    cold = [run["cold_seconds"] for run in runs if run["cold_seconds"] is not None]
    return {
        **{name: runs[0][name] for name in ("dataset", "accelerator", "precision", "parameters")},
        "accuracy": mean_interval([run["accuracy"] for run in runs]),
        "views": {"views": views[0]["views"], **mean_interval([view["accuracy"] for view in views])} if views else None,
        "warm": bool(warm),
        "seconds": spread(run["seconds"] for run in warm or runs),
        "images_per_second": spread(run["images_per_second"] or 0.0 for run in warm or runs),
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


def texts_of(entry: Mapping[str, Any]) -> dict[str, str]:
    """The texts of a summary by the names of their columns; – for what there is not."""
    accuracy, views, cold, device = (entry[name] for name in ("accuracy", "views", "cold_seconds", "device_memory_mb"))
    interval = "–" if accuracy["low"] is None else f"{100 * accuracy['low']:.2f} … {100 * accuracy['high']:.2f}"
    return {
        "n": str(accuracy["n"]),
        "test accuracy": mean_text(accuracy),
        "95 % of the mean": interval,
        "with views": f"{mean_text(views)} ({views['views']})" if views else "–",
        "train s": spread_text(entry["seconds"], ",.2f"),
        "cold s": spread_text(cold, ",.1f") if cold else "–",
        "images/s": f"{entry['images_per_second']['median']:,.0f}",
        "peak MB": f"{entry['memory_mb']:,}" + (f" + {device:,} on the device" if device is not None else ""),
    }


def report(figures: dict[str, Any], file: str | None) -> None:
    """Prints a row for each recipe, and writes the figures to a file if one is named."""
    rows = {name: texts_of(entry) for name, entry in figures["recipes"].items()}
    columns = [column for column in next(iter(rows.values())) if any(row[column] != "–" for row in rows.values())]
    not_warm = [name for name, entry in figures["recipes"].items() if not entry["warm"]]
    publish(
        figures,
        file,
        "test accuracy and time",
        ["recipe", *columns],
        [[name, *(row[column] for column in columns)] for name, row in rows.items()],
        *LEGEND,
        *(f"{name}: no run was warm, the times are those of first runs" for name in not_warm),
        "",
        SHARED,
    )
    if file:
        print(f"written: {display_path(Path(file))}")
