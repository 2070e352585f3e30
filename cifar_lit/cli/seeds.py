"""`train --seeds 0-4`: one training per seed, with the mean, standard deviation and interval of the results."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cifar_lit.cli.fit import TrainingCLI
from cifar_lit.cli.flags import Command
from cifar_lit.cli.seeds_file import write_seeds_file
from cifar_lit.cli.several import check_one_device, check_several, group_folder, show_runs, train_each
from cifar_lit.errors import Failure, UsageError
from cifar_lit.files import write_text
from cifar_lit.runs.run_folder import display_path, read_metrics
from cifar_lit.stats import ANY, SHARE, limits_text, mean_interval
from cifar_lit.text import say

FILE = "seeds.json"
SETTING = "seed_everything"
MOST = 1000  # seeds of one command
RESULTS = ("accuracy", "accuracy with TTA", "loss", "train seconds")


def train_seeds(command: Command) -> None:
    """Train once per seed. A repeated command continues unfinished trainings; one with more seeds adds the missing.

    With --json, a repeated command trains no seed again.
    """
    check_several(command, "--seeds", "continues unfinished trainings by itself: leave --resume out", SETTING)
    seeds = read_seeds(command.several["seeds"])
    file = Path(command.json) if command.json else None
    if file:
        check_one_device(command.value("trainer.devices"), "--json measures")
        file.parent.mkdir(parents=True, exist_ok=True)  # fail before the trainings, not after them

    def continues(content: Mapping[str, object]) -> bool:
        """Continue a folder without other seeds that lacks some of them or its results, or has the same file."""
        earlier = set(read_seeds(str(content["seeds"])))
        repeats = file is not None and file.exists() and content.get("json") == command.json
        return earlier < set(seeds) or (earlier == set(seeds) and ("runs" not in content or repeats))

    with group_folder(command, "seeds", FILE, continues) as (path, record):
        trainings = {}
        for number, seed in enumerate(seeds, 1):
            trainings[f"seed {seed} ({number} of {len(seeds)})"] = {SETTING: seed}
        trained: list[str] = []  # by this process without an interruption

        def note_trained(cli: TrainingCLI) -> None:
            if cli.checkpoint is None:
                trained.append(cli.run.folder.path.name)

        runs = train_each(command, trainings, path, note_trained)
        record["json"] = command.json
        finish(path, record, {display_path(run): read_metrics(run) for run in runs})
        if file:
            write_seeds_file(command, runs, warm=trained[1:])


def read_seeds(text: str) -> list[int]:
    """Return the seeds of a list such as 0-4 or 0,3,8-11; raise UsageError if it is invalid or is a single number."""
    seeds: dict[int, None] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        if match:
            first, last = int(match[1]), int(match[2] or match[1])
            seeds |= dict.fromkeys(range(first, min(last, first + MOST) + 1))
        if not match or last < first or len(seeds) > MOST:
            raise UsageError(f"--seeds must be seeds such as 0-4 or 1,2,3, at most {MOST} of them, not {text[:80]!r}")
    if len(seeds) < 2 and "-" not in text:
        raise UsageError(f"--seeds {text} is one seed: name several, such as 0-4, or use --seed {text}")
    return [*seeds]


def finish(path: Path, record: Mapping[str, Any], runs: Mapping[str, Mapping[str, Any]]) -> None:
    """Write seeds.json and print the results. runs: metrics.json by run folder."""
    data = {str([metrics.get("data"), metrics["test"].get("fingerprint")]) for metrics in runs.values()}
    if len(data) > 1:
        reason = "the images have changed between its trainings"
        raise Failure(f"{display_path(path)} has no mean, because {reason}: remove the folder, and start again")
    rows = {run: results(metrics) for run, metrics in runs.items()}
    spreads = {}
    for name in RESULTS:
        limits = ANY
        if name.startswith("accuracy"):
            limits = SHARE
        if all(name in row for row in rows.values()):  # a diverged net has no loss
            spreads[name] = mean_interval([row[name] for row in rows.values()], limits)
    write_text(path / FILE, json.dumps({**record, "runs": [*runs], **spreads}, indent=2) + "\n")
    titled = {f"{run} (seed {runs[run]['seed']})": row for run, row in rows.items()}
    show_runs("test results of each seed", "run", titled, [*spreads], spreads)
    for name in ("accuracy with TTA", "accuracy"):
        if name in spreads:
            say(f"test {name} {_spread_text(spreads[name])}")
    folder = display_path(path)
    say(f"results {folder}", "", "next:", f"  cifar-lit compare {shlex.quote(folder)} OTHER-SEEDS-FOLDER")


def _spread_text(spread: Mapping[str, Any]) -> str:
    text = f"{spread['mean']:.4f}"
    if spread["n"] > 1:
        text += f" ± {spread['std']:.4f}"
    text += f" · n = {spread['n']}"
    if limits := limits_text(spread):
        text += f" · 95 % interval of the mean {limits}"
    return text


def results(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the results of a run that seeds differ in, from the content of metrics.json."""
    test = metrics["test"]
    found = {"accuracy": test["accuracy"]}
    if "tta" in test:
        found["accuracy with TTA"] = test["tta"]["accuracy"]
    if test["loss"] is not None:
        found["loss"] = test["loss"]
    found["train seconds"] = metrics["train_seconds"]
    return found
