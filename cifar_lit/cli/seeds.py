"""`train --seeds 0-4`: one training per seed, with the mean, standard deviation and interval of the results."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cifar_lit.base.errors import Failure, UsageError
from cifar_lit.base.files import display_path, read_json, write_text
from cifar_lit.base.hardware import detect_machine
from cifar_lit.base.stats import ANY, SHARE, limits_text, mean_interval
from cifar_lit.base.text import say
from cifar_lit.cli.fit import Training, program
from cifar_lit.cli.flags import Command, recipe_path
from cifar_lit.cli.launch import logs_of
from cifar_lit.cli.several import check_several, mean_text, train_each
from cifar_lit.run.folder import RunFolder
from cifar_lit.run.record import read_metrics
from cifar_lit.run.results import versions
from cifar_lit.training.orderly_stop import Interrupted

FILE = "seeds.json"
RESULTS = {"loss": ANY, "train seconds": ANY, "accuracy with TTA": SHARE, "accuracy": SHARE}  # possible values


def train_seeds(command: Command) -> None:
    """Train once per seed. A repeated command continues unfinished trainings; one with more seeds adds the missing."""
    text = command.several["seeds"]
    seeds = read_seeds(text)
    check_several(command)
    if command.json:
        Path(command.json).parent.mkdir(parents=True, exist_ok=True)  # fail before the trainings, not after them
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
    trained: list[str] = []  # by this process without an interruption

    def note_trained(training: Training) -> None:
        if not training.run.folder.resumed:
            trained.append(training.run.folder.path.name)

    trainings = {}
    for number, seed in enumerate(seeds, 1):
        trainings[f"seed {seed} ({number} of {len(seeds)})"] = {"seed_everything": seed}
    path = folder.claim()
    try:
        write_text(path / FILE, json.dumps(record) + "\n")
        runs = train_each(command, trainings, path, note_trained)
        finish(path, record, runs)
        if command.json:
            write_seeds_file(command, runs, warm=trained[1:])
    except Interrupted as interruption:
        words = [*command.words, f"--seeds={text}"]
        if command.json:
            words.append(f"--json={command.json}")
        interruption.resume = f"{program('train')} {shlex.join(words)}"
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
                line += f" · 95 % interval of the mean {limits}"
            say(line.replace("accuracy", "test accuracy"))
    write_text(path / FILE, json.dumps({**record, "runs": list(map(display_path, runs)), **spreads}, indent=2) + "\n")
    folder = display_path(path)
    say(f"results {folder}", "", "next:", f"  cifar-lit compare {shlex.quote(folder)} OTHER-SEEDS-FOLDER")


# ---- the file of --json

PLACES = re.compile(r"--(data-dir|data\.root|data\.(loading\.)?cache_dir)=")  # paths, left out of the recorded flags
FIGURES = ("seed", "dataset", "accelerator", "precision", "parameters", "images_per_second", "test_seconds")
SCORES = ("accuracy", "loss", "balanced_accuracy", "macro_f1")


def write_seeds_file(command: Command, runs: Sequence[Path], warm: Collection[str]) -> None:
    """Write the --json file with these runs.

    Args:
        command: the command, with `json`.
        runs: folders of finished runs.
        warm: names of the runs whose time counts. The first training of a process loads code.
    """
    name = "custom"
    if command.recipe:
        name = recipe_path(command.recipe).stem
    entries = []
    for run in runs:
        metrics = read_metrics(run)
        test = metrics["test"]
        entry = {key: metrics[key] for key in FIGURES} | {key: test[key] for key in SCORES}
        entry |= {"views": test.get("tta"), "seconds": metrics["train_seconds"], "first": run.name not in warm}
        entries.append(entry)
    accuracy = mean_interval([entry["accuracy"] for entry in entries], SHARE)
    content = {
        "bench": "recipe",
        "settings": {"flags": [word for word in command.flags if not PLACES.match(word)]},
        "environment": environment(),
        "recipes": {name: {"accuracy": accuracy, "runs": entries}},
    }
    write_text(Path(str(command.json)), json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def environment() -> dict[str, Any]:
    """Return date, cpu, bf16 (hardware support), threads (of torch), gpu (None without) and versions."""
    machine = detect_machine()
    gpus = [name for name, _ in machine.gpus]
    gpu = None
    if gpus:
        gpu = gpus[0] if len(gpus) == 1 else f"{len(gpus)} × {gpus[0]}"
    elif machine.mps:
        gpu = "Apple GPU"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": exact_cpu(machine.cpu),
        "bf16": machine.bf16,
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "versions": versions(),
    }


def exact_cpu(name: str) -> str:
    """Return the name of the CPU, with family and model if it has no number: a virtual machine may hide the product."""
    info = Path("/proc/cpuinfo")
    if re.search(r"\d", name.partition("@")[0]) or not info.is_file():
        return name
    numbers = re.findall(r"^(?:cpu )?(family|model)\s*: (\d+)$", info.read_text(encoding="utf-8"), re.MULTILINE)[:2]
    return f"{name} ({', '.join(map(' '.join, numbers))})"
