"""Compare a run with an undisturbed run: bit for bit, or up to rounding."""

from __future__ import annotations

import csv
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
    "train_seconds", "images_per_second", "test_seconds", "seconds", "validation", "sha256", "current_score",
)  # fmt: skip
# Values that depend on the number of processes: random states, partial sums and batch counts of each process, and the
# scores for --reject, which depend on features in half precision. The total sums and the features are compared.
NOT_ROUNDED = ("random_state", "device_sums", "epoch_loop.val_loop.batch_progress", "devices", "changes", "reject")


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


def differences(run: Path, expected: Path, tolerance: float = 0.0) -> list[str]:
    """Return the places in checkpoints, curves, results and other files where two runs differ.

    Args:
        tolerance: for runs resumed with another number of processes: floating-point values may differ by it, absolutely
            or, above 1, relatively. `NOT_ROUNDED` is ignored.
    """
    ignored = (*NEVER_EQUAL, *(NOT_ROUNDED if tolerance else ()))
    first, second = (comparable(contents(each, parsed=tolerance > 0), ignored) for each in (run, expected))
    return unequal(first, second, tolerance=tolerance)


def contents(run: Path, parsed: bool) -> dict[str, Any]:
    """Return the content of each file of a run by name. parsed: numbers of tables instead of bytes."""
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
            rows = csv.reader(path.read_text().splitlines())
            value["rows"] = [[_number(cell) for cell in row] for row in rows] if parsed else path.read_bytes()
        elif path.suffix == ".safetensors":
            with safe_open(path, "pt") as model:
                metadata = {**model.metadata(), "card": json.loads(model.metadata()["card"])}
                value.update({name: model.get_tensor(name) for name in model.keys()}, metadata=metadata)  # noqa: SIM118
    return files


def _number(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell


def comparable(value: Any, ignored: tuple[str, ...] = NEVER_EQUAL) -> Any:
    """Return nested values without the ignored keys, and with paths reduced to their last part."""
    if isinstance(value, dict):
        return {comparable(key): comparable(inner, ignored) for key, inner in value.items() if key not in ignored}
    if isinstance(value, list | tuple):
        return [comparable(inner, ignored) for inner in value]
    return value.rpartition("/")[2] if isinstance(value, str) else value


def unequal(first: Any, second: Any, path: str = "", tolerance: float = 0.0) -> list[str]:
    """Return the paths where two nested values differ: tensors and floats by more than `tolerance`, others at all."""
    if isinstance(first, dict) and isinstance(second, dict):
        places = [f"{path}.{key}" for key in first.keys() ^ second.keys()]
        for key in sorted(first.keys() & second.keys(), key=str):
            places += unequal(first[key], second[key], f"{path}.{key}", tolerance)
        return places
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        return [place for number, pair in pairs for place in unequal(*pair, f"{path}.{number}", tolerance)]
    if type(first) is not type(second):
        return [path]
    if isinstance(first, Tensor):
        return [] if first.dtype == second.dtype and _same_tensor(first, second, tolerance) else [path]
    close = isinstance(first, float) and tolerance and abs(first - second) <= tolerance * max(1.0, abs(second))
    return [] if close or first == second or (first != first and second != second) else [path]


def _same_tensor(first: Tensor, second: Tensor, tolerance: float) -> bool:
    if torch.equal(first, second):
        return True
    if not tolerance or first.shape != second.shape or not first.is_floating_point():
        return False
    limit = max(tolerance, torch.finfo(first.dtype).eps)  # at least the precision of the type
    return bool(((first.double() - second.double()).abs() <= limit * second.double().abs().clamp_min(1.0)).all())
