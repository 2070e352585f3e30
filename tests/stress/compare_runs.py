"""Compare a run with an undisturbed run, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from cifar_lit.training.checkpoint import read_checkpoint

# Left by a kill, by the scheduler's job, or by a rank that hung.
NOT_RESULTS = (".lock", ".job")
# Times, clocks, the digest of a model, which follows from its other fields, and the last score that a ModelCheckpoint
# saved, which Lightning does not restore.
NEVER_EQUAL = (
    "date", "command", "train_seconds", "images_per_second", "test_seconds", "seconds", "validation", "sha256",
    "current_score",
)  # fmt: skip


def run_in(folder: Path) -> Path | None:
    """Return the newest run in a folder of runs."""
    runs = sorted(folder.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime_ns)
    return runs[-1].parent if runs else None


def finished(run: Path) -> bool:
    """Return whether a run has been tested and its results written."""
    try:
        return bool(json.loads((run / "metrics.json").read_text())["test"])
    except (OSError, ValueError, KeyError):
        return False


def differences(run: Path, expected: Path) -> list[str]:
    """Return the places in checkpoints, curves, results and other files where two runs differ."""
    return unequal(comparable(contents(run)), comparable(contents(expected)))


def contents(run: Path) -> dict[str, Any]:
    """Return the content of each file of a run by name."""
    files: dict[str, Any] = {}
    for path in run.rglob("*"):
        if not path.is_file() or "tfevents" in path.name or path.name in NOT_RESULTS:
            continue
        files[path.relative_to(run).as_posix()] = value = {}
        if path.name in ("last.ckpt", "best.ckpt"):
            value.update(read_checkpoint(path))
        elif path.name == "metrics.json":
            value.update(json.loads(path.read_text()))
        elif path.suffix == ".csv":
            value["bytes"] = path.read_bytes()
        elif path.suffix == ".safetensors":
            with safe_open(path, "pt") as model:
                metadata = {**model.metadata(), "card": json.loads(model.metadata()["card"])}
                value.update({name: model.get_tensor(name) for name in model.keys()}, metadata=metadata)  # noqa: SIM118
    return files


def comparable(value: Any) -> Any:
    """Return nested values without those that are never equal, and with paths reduced to their last part."""
    if isinstance(value, dict):
        return {comparable(key): comparable(inner) for key, inner in value.items() if key not in NEVER_EQUAL}
    if isinstance(value, list | tuple):
        return [comparable(inner) for inner in value]
    return value.rpartition("/")[2] if isinstance(value, str) else value


def unequal(first: Any, second: Any, path: str = "") -> list[str]:
    """Return the paths where two nested values differ."""
    if isinstance(first, dict) and isinstance(second, dict):
        places = [f"{path}.{key}" for key in first.keys() ^ second.keys()]
        for key in sorted(first.keys() & second.keys(), key=str):
            places += unequal(first[key], second[key], f"{path}.{key}")
        return places
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        return [place for number, pair in pairs for place in unequal(*pair, f"{path}.{number}")]
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return [] if first.dtype == second.dtype and torch.equal(first, second) else [path]
    is_equal = type(first) is type(second) and (first == second or (first != first and second != second))  # NaN
    return [] if is_equal else [path]
