"""What a run left behind, compared bit for bit with a run that nothing happened to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from cifar_lit.training.checkpoints import read_checkpoint

TIMES = ("train_seconds", "images_per_second")  # of metrics.json
LOCKS = (".lock", ".owner")  # which a kill in the last moment leaves, as nobody goes on with the run any more
CLOCKS = ("seconds", "validation")  # of checkpoints


def run_in(folder: Path) -> Path | None:
    """The newest run below a folder of runs, None when there is none."""
    runs = sorted(folder.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime_ns)
    return runs[-1].parent if runs else None


def finished(run: Path) -> bool:
    """Whether a run has been tested, and its results written."""
    try:
        return bool(json.loads((run / "metrics.json").read_text())["test"])
    except (OSError, ValueError, KeyError):
        return False


def differences(run: Path, expected: Path) -> list[str]:
    """In what a run differs from the undisturbed one: weights, optimizer, averages, curves, results, files; nothing if in none.

    Times differ always and do not count; nor do the paths that a checkpoint holds, but for their last part.
    """
    found = []
    for name in ("last.ckpt", "best.ckpt"):
        first, second = (plain(read_checkpoint(each / "checkpoints" / name)) for each in (run, expected))
        found += [f"{name}: {path}" for path in unequal(first, second)]
    kept, whole = (_model(each / "model.safetensors") for each in (run, expected))
    found += [f"model.safetensors: {path}" for path in unequal(kept, whole)]
    for name in ("metrics.csv", "predictions.csv"):
        contents = [path.read_bytes() if path.exists() else None for path in (run / name, expected / name)]
        if contents[0] != contents[1]:
            found.append(name)
    results = [json.loads((each / "metrics.json").read_text()) for each in (run, expected)]
    found += [f"metrics.json: {name}" for name in results[1] if name not in TIMES and results[0].get(name) != results[1][name]]
    names = [
        {path.relative_to(each).as_posix() for path in each.rglob("*") if path.is_file() and "tfevents" not in path.name}
        for each in (run, expected)
    ]
    return found + [f"file {name}" for name in sorted(names[0] ^ names[1]) if name not in LOCKS]


def _model(file: Path) -> dict[str, Any]:
    """Metadata and tensors of a model.safetensors, whose bytes have the former in any order; empty where there is none."""
    if not file.exists():
        return {}
    with safe_open(file, "pt") as opened:
        return {"": opened.metadata(), **{name: opened.get_tensor(name) for name in opened.keys()}}  # noqa: SIM118 (no mapping)


def plain(value: Any) -> Any:
    """A checkpoint's contents without the times, and with the last part of each path in its place."""
    if isinstance(value, dict):
        return {plain(key): plain(inner) for key, inner in value.items() if key not in CLOCKS}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value.rpartition("/")[2] if isinstance(value, str) else value


def unequal(first: Any, second: Any, path: str = "") -> list[str]:
    """Where two nested values differ; tensors must be equal to the last bit."""
    if isinstance(first, dict) and isinstance(second, dict):
        alone = [f"{path}.{key}" for key in first.keys() ^ second.keys()]
        shared = sorted(first.keys() & second.keys(), key=str)
        return alone + [place for key in shared for place in unequal(first[key], second[key], f"{path}.{key}")]
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        return [place for number, pair in pairs for place in unequal(*pair, f"{path}.{number}")]
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return [] if first.dtype == second.dtype and torch.equal(first, second) else [path]
    return [] if type(first) is type(second) and (first == second or first != first) else [path]
