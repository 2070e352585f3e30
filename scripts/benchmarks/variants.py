"""Compare variants of a recipe on held-out images: python scripts/benchmarks/variants.py variants.json."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from report import Row, figures_of, publish, spread, write_figures

WHAT = (
    'Train a recipe and variants of it, given as flags in a JSON file such as {"low": ["--lr", "0.1"]}, with several '
    "seeds, two trainings of one thread at a time. They are compared on held-out training images, seed by seed; the "
    "test images are not used. If the --json file exists, only missing trainings are done. The variants should take "
    "the same time: see units.py."
)
UNCHANGED = "unchanged"  # name of the recipe itself


def run(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=WHAT, epilog="Further flags, as --data-dir DATA, go to all trainings.")
    parser.add_argument("file", metavar="FILE.json", type=Path, help="flags of each variant by its name")
    parser.add_argument("--recipe", default="cpu91", help="recipe to vary")
    parser.add_argument("--runs", type=int, default=8, help="number of seeds")
    parser.add_argument("--held-out", type=int, default=10_000, help="number of held-out training images")
    parser.add_argument("--json", metavar="FILE", type=Path, required=True, help="file of the results")
    settings, flags = parser.parse_known_args(argv)
    changes: dict[str, list[str]] = {UNCHANGED: [], **json.loads(settings.file.read_text(encoding="utf-8"))}
    kept = {"recipe": settings.recipe, "held_out": settings.held_out, "changes": changes, "json": settings.json}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in changes}
    if settings.json.exists():
        runs |= runs_of(settings.json, kept)
    done = {(one["seed"], name) for name, same in runs.items() for one in same}
    plans = [plan for plan in product(range(settings.runs), changes) if plan not in done]
    common = ["--data.val_size", str(settings.held_out), *flags]
    with ThreadPoolExecutor(2) as pool:
        jobs = {pool.submit(train, settings.recipe, seed, [*common, *changes[name]]): name for seed, name in plans}
        for job in as_completed(jobs):
            name = jobs[job]
            runs[name] = sorted([*runs[name], job.result()], key=lambda known: int(known["seed"]))
            write_figures(settings.json, figures_of("variants", kept, rows_of(runs), runs=runs))
    publish("variants", kept, rows_of(runs), runs=runs)


def runs_of(path: Path, settings: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the trainings in a file of results; exit if they were done with other settings.

    Variants may be added to a file.
    """
    known = json.loads(path.read_text(encoding="utf-8"))
    earlier = known["settings"]
    changed = [name for name in ("recipe", "held_out") if earlier[name] != settings[name]]
    flags = settings["changes"]
    changed += [f"variant {name!r}" for name, same in earlier["changes"].items() if flags.get(name) != same]
    if changed:
        raise SystemExit(f"{path} was measured with another {', '.join(changed)}: choose another --json file")
    runs: dict[str, list[dict[str, Any]]] = known["runs"]
    return runs


def differences_of(runs: Mapping[str, Sequence[Mapping[str, Any]]], name: str) -> list[float]:
    """Return how much more accurate a variant is than the unchanged recipe, for each seed that both were trained with.

    Args:
        runs: trainings by variant, as `train` returns them.
        name: the variant.
    """
    base = {one["seed"]: one["accuracy"] for one in runs[UNCHANGED]}
    return [one["accuracy"] - base[one["seed"]] for one in runs[name] if one["seed"] in base]


def rows_of(runs: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """Return accuracies, their differences to the unchanged recipe with the same seed, and training times."""
    rows: list[Row] = []
    for name, same in runs.items():
        if not same:
            continue
        rows.append((f"{name}: held-out accuracy", spread(100 * one["accuracy"] for one in same), "%"))
        differences = [100 * difference for difference in differences_of(runs, name)]
        if name != UNCHANGED and differences:
            rows.append((f"{name}: difference", spread(differences), "points"))
        rows.append((f"{name}: training", spread(one["seconds"] for one in same), "s"))
    return rows


def train(recipe: str, seed: int, flags: list[str]) -> dict[str, Any]:
    """Train one variant; return seed, held-out accuracy, held-out loss and seconds of the training."""
    with TemporaryDirectory() as logs:
        command = [sys.executable, "-m", "cifar_lit", "fit", "--recipe", recipe, "--seed", str(seed), "--logs", logs]
        answer = subprocess.run([*command, "--threads", "1", "--logger", "csv", *flags], capture_output=True, text=True)
        found = list(Path(logs).glob("*/metrics.json"))
        if answer.returncode or not found:
            raise SystemExit(
                f"seed {seed} with {' '.join(flags)}: {answer.stderr.strip() or 'the training was stopped'}"
            )
        metrics = json.loads(found[0].read_text(encoding="utf-8"))
    scores = {name: metrics["val"][name] for name in ("accuracy", "loss")}
    return {"seed": seed, **scores, "seconds": metrics["train_seconds"]}


if __name__ == "__main__":
    run()
