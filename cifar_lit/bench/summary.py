"""What many runs of a recipe come to, and the table that shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cifar_lit.bench.curve import first_pass
from cifar_lit.bench.report import show, shown_spread, spread
from cifar_lit.runs.compare import mean_interval

LEGEND = (
    "± is the standard deviation over seeds; train s, with its quartiles, is the whole fit with its validations, warm",
    "cold s is from the process's start to the tested net; peak MB is of the process, with all runs before",
)


def summary(runs: Sequence[Mapping[str, Any]], passes: Sequence[float] = ()) -> dict[str, Any]:
    """Accuracy over all runs, times over the warm ones.

    runs: as `run_once` returns them, with `first` for those that were their process's first of this recipe, in which
    code is loaded and kernels are compiled or captured; their times count only where there are no others.
    passes: accuracies (fractions); for each the seconds at which the runs' curves reach it.
    """
    warm = [run for run in runs if not run["first"]]
    timed = warm or runs
    views = [run["views"] for run in runs if run["views"]]
    cold = [run["cold_seconds"] for run in runs if run["cold_seconds"] is not None]
    device_memory = [run["device_memory_mb"] for run in runs if run["device_memory_mb"] is not None]
    reached = {threshold: [first_pass(run["curve"] or (), threshold) for run in timed] for threshold in passes}
    return {
        **{name: runs[0][name] for name in ("dataset", "accelerator", "precision", "parameters")},
        "accuracy": mean_interval([run["accuracy"] for run in runs]),
        "views": {"views": views[0]["views"], **mean_interval([view["accuracy"] for view in views])} if views else None,
        "warm": bool(warm),
        "seconds": spread([run["seconds"] for run in timed]),
        "images_per_second": spread([run["images_per_second"] or 0.0 for run in timed]),
        "cold_seconds": spread(cold) if cold else None,
        "memory_mb": max(run["memory_mb"] for run in runs),
        "device_memory_mb": max(device_memory, default=None),
        "passes": {
            f"{threshold:g}": spread(seconds) if (seconds := [value for value in values if value is not None]) else None
            for threshold, values in reached.items()
        },
    }


def percent(value: float) -> str:
    """A fraction as 94.05 %."""
    return f"{100 * value:.2f} %"


def mean_text(found: Mapping[str, Any]) -> str:
    """A mean of fractions with the runs' deviation: 94.05 % ± 0.14."""
    return percent(found["mean"]) + (f" ± {100 * found['std']:.2f}" if found["std"] is not None else "")


def memory_text(entry: Mapping[str, Any]) -> str:
    """Peak memory in MB, the accelerator's behind a plus."""
    device = entry["device_memory_mb"]
    return f"{entry['memory_mb']:,}" + (f" + {device:,} on the device" if device is not None else "")


def machine_text(environment: Mapping[str, Any], accelerator: str | None = None) -> str:
    """The GPU where there is one, unless `accelerator` is the CPU; else the CPU with torch's threads."""
    if environment.get("gpu") and accelerator != "cpu":
        return str(environment["gpu"])
    threads = environment["threads"]
    return f"{environment['cpu']}, {threads} thread{'s' * (threads != 1)}"


def print_summary(figures: Mapping[str, Any]) -> None:
    """Prints a row for each recipe, and when it passes what was asked for."""
    recipes = figures["recipes"]
    with_views = ["with views"] if any(entry["views"] for entry in recipes.values()) else []
    columns = ["recipe", "n", "test accuracy", "95 % of the mean", *with_views, "train s", "cold s", "images/s", "peak MB"]
    rows, lines = [], list(LEGEND)
    for name, entry in recipes.items():
        accuracy, views, seconds, cold = (entry[part] for part in ("accuracy", "views", "seconds", "cold_seconds"))
        interval = f"{100 * accuracy['low']:.2f} … {100 * accuracy['high']:.2f}" if accuracy["low"] is not None else "–"
        row = [name, str(accuracy["n"]), mean_text(accuracy), interval]
        if with_views:
            row.append(f"{mean_text(views)} ({views['views']})" if views else "–")
        row += [shown_spread(seconds, ",.2f"), shown_spread(cold, ",.1f") if cold else "–"]
        rows.append([*row, f"{entry['images_per_second']['median']:,.0f}", memory_text(entry)])
        if not entry["warm"]:
            lines.append(f"{name}: no run was warm, the times are those of first runs")
        for threshold, found in entry["passes"].items():
            share = f" ({found['n']} of {seconds['n']} timed runs)" if found else ""
            when = f"after {shown_spread(found, ',.2f')} s{share}" if found else "never"
            lines.append(f"{name} first passes {percent(float(threshold))}: {when}")
    show("test accuracy and time", columns, rows, *lines)
