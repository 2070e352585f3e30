"""`train --seeds 0-4`: one training per seed, with the mean, standard deviation and interval of the results."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cifar_lit.base.errors import Failure, UsageError
from cifar_lit.base.files import display_path, read_json, write_text
from cifar_lit.base.stats import POSITIVE, SHARE, limits_text, mean_interval
from cifar_lit.base.text import quoted, say
from cifar_lit.cli.console import say_wrapped
from cifar_lit.cli.fit import program
from cifar_lit.cli.flags import Command, recipe_path
from cifar_lit.cli.launch import logs_of
from cifar_lit.cli.several import check_several, mean_text, train_each
from cifar_lit.run.folder import RunFolder
from cifar_lit.run.record import read_metrics
from cifar_lit.training.orderly_stop import Interrupted

FILE = "seeds.json"
RESULTS = {
    "loss": POSITIVE,
    "train seconds": POSITIVE,
    "accuracy with TTA": SHARE,
    "accuracy": SHARE,
}  # possible values


def train_seeds(command: Command) -> None:
    """Train once per seed. A repeated command continues unfinished trainings; one with more seeds adds the missing."""
    text = command.several["seeds"]
    seeds = read_seeds(text)
    check_several(command)
    files = [Path(config).expanduser() for config in command.configs]
    name = "seeds"
    if command.recipe:
        files.insert(0, recipe_path(command.recipe))
        name = f"{files[0].stem}-seeds"
    record: dict[str, Any] = {
        "command": command.words,
        "files": [path.read_text(encoding="utf-8") for path in files],
        "seeds": text,
    }
    logs = logs_of(command)
    folder = RunFolder(logs, name, _earlier_group(logs, record))
    trainings = {}
    for number, seed in enumerate(seeds, 1):
        trainings[f"seed {seed} ({number} of {len(seeds)})"] = {"seed_everything": seed}
    path = folder.claim()
    try:
        write_text(path / FILE, json.dumps(record) + "\n")
        finish(path, record, train_each(command, trainings, path))
    except Interrupted as interruption:
        words = [*command.words, f"--seeds={text}"]
        interruption.resume = f"{program('train')} {quoted(*words)}"
        raise
    finally:
        folder.release()
        if [entry.name for entry in path.iterdir()] == [FILE]:  # the first training failed at its start
            (path / FILE).unlink()
            path.rmdir()


def read_seeds(text: str) -> list[int]:
    """Return the seeds of a list such as 0-4 or 0,3,8-11; raise UsageError if it is invalid."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not match:
            raise UsageError(f"--seeds must be seeds such as 0-4 or 1,2,3, not {text!r}")
        first, last = match.groups(default=match[1])
        seeds += range(int(first), int(last) + 1)
    if not seeds:
        raise UsageError(f"--seeds {text} names no seed: the first of a range comes first, as in 0-4")
    return list(dict.fromkeys(seeds))


def _earlier_group(logs: Path, record: Mapping[str, Any]) -> Path | None:
    """Return the folder of the same command and files that lacks some of the seeds, or its results; None if none."""
    seeds = set(read_seeds(record["seeds"]))
    for file in logs.glob(f"*/{FILE}"):
        earlier = read_json(file)
        if (earlier.get("command"), earlier.get("files")) != (record["command"], record["files"]):
            continue
        trained = set(read_seeds(earlier["seeds"]))
        is_complete = trained == seeds and "runs" in earlier
        if trained <= seeds and not is_complete:
            return file.parent
    return None


def finish(path: Path, record: Mapping[str, Any], runs: Sequence[Path]) -> None:
    """Write seeds.json and print the results."""
    values: dict[str, list[float]] = {name: [] for name in RESULTS}
    data = set()
    for run in runs:
        metrics = read_metrics(run)
        test = metrics["test"]
        data.add(str([metrics.get("data"), test.get("fingerprint")]))
        values["accuracy"].append(test["accuracy"])
        values["train seconds"].append(metrics["train_seconds"])
        if test["loss"] is not None:  # a diverged net has none
            values["loss"].append(test["loss"])
        if "tta" in test:
            values["accuracy with TTA"].append(test["tta"]["accuracy"])
    if len(data) > 1:
        raise Failure(f"the images have changed between the trainings in {display_path(path)}: remove it, start again")
    spreads = {}
    for name, possible in RESULTS.items():
        if len(values[name]) == len(runs):
            spreads[name] = mean_interval(values[name], possible)
            line = f"{name} {mean_text(spreads[name])}"
            if limits := limits_text(spreads[name]):
                line += f" · 95 % interval {limits}"
            say_wrapped(line.replace("accuracy", "test accuracy"))
    write_text(path / FILE, json.dumps({**record, "runs": list(map(display_path, runs)), **spreads}, indent=2) + "\n")
    folder = display_path(path)
    say(f"results {folder}", "", "next:", f"  cifar-lit compare {quoted(folder)} OTHER-SEEDS-FOLDER")
