"""What a run left behind, compared with a run that nothing happened to: bit for bit, or up to rounding."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from cifar_lit.training.checkpoint import read_checkpoint

NOT_RESULTS = (".lock", ".owner", ".job")  # a lock that a kill in the last moment left, and who started the run
# of metrics.json the times, of checkpoints the clocks, and the digest of a model, which follows from the rest
NEVER_EQUAL = ("train_seconds", "images_per_second", "seconds", "validation", "sha256")
# what is not compared up to rounding, as there is one of it for each process: of checkpoints the states from which dropout
# would draw, the parts of a sum that is compared itself, and how many batches of a validation were its; of metrics.json how
# many there were; and the threshold of what looks foreign, which hangs on features in half precision, compared themselves
NOT_ROUNDED = ("random_state", "device_sums", "epoch_loop.val_loop.batch_progress", "devices", "threshold")


def run_in(folder: Path) -> Path | None:
    """The newest run in a folder of runs, None when there is none."""
    runs = sorted(folder.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime_ns)
    return runs[-1].parent if runs else None


def finished(run: Path) -> bool:
    """Whether a run has been tested, and its results written."""
    try:
        return bool(json.loads((run / "metrics.json").read_text())["test"])
    except (OSError, ValueError, KeyError):
        return False


def differences(run: Path, expected: Path, tolerance: float = 0.0) -> list[str]:
    """In what a run differs from the undisturbed one: weights, optimizer, averages, curves, results, files; nothing if in none.

    With a `tolerance`, for a run that went on with another number of processes, fractions may differ by it, absolutely or,
    above 1, relatively, and `NOT_ROUNDED` does not count.
    """
    left_out = (*NEVER_EQUAL, *(NOT_ROUNDED if tolerance else ()))
    first, second = (comparable(contents(each, parsed=tolerance > 0), left_out) for each in (run, expected))
    return unequal(first, second, tolerance=tolerance)


def contents(run: Path, parsed: bool) -> dict[str, Any]:
    """What a run's files hold, by their names. parsed: of tables the numbers, not the bytes."""
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
            with path.open(newline="") as file:
                value["rows"] = (
                    [[_number(cell) for cell in row] for row in csv.reader(file)] if parsed else path.read_bytes()
                )
        elif path.suffix == ".safetensors":
            with safe_open(path, "pt") as model:
                metadata = {
                    name: json.loads(text) if name == "card" else text for name, text in model.metadata().items()
                }
                value.update({name: model.get_tensor(name) for name in model.keys()}, metadata=metadata)  # noqa: SIM118
    return files


def _number(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell


def comparable(value: Any, left_out: tuple[str, ...] = NEVER_EQUAL) -> Any:
    """Nested values without the keys that are left out, and with the last part of each path in its place."""
    if isinstance(value, dict):
        return {comparable(key): comparable(inner, left_out) for key, inner in value.items() if key not in left_out}
    if isinstance(value, list | tuple):
        return [comparable(inner, left_out) for inner in value]
    return value.rpartition("/")[2] if isinstance(value, str) else value


def unequal(first: Any, second: Any, path: str = "", tolerance: float = 0.0) -> list[str]:
    """Where two nested values differ: tensors and fractions by more than `tolerance`, for 0 in any bit; all else at all."""
    if isinstance(first, dict) and isinstance(second, dict):
        alone = [f"{path}.{key}" for key in first.keys() ^ second.keys()]
        shared = sorted(first.keys() & second.keys(), key=str)
        return alone + [
            place for key in shared for place in unequal(first[key], second[key], f"{path}.{key}", tolerance)
        ]
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
    limit = max(tolerance, torch.finfo(first.dtype).eps)  # half precision cannot come closer
    return bool(((first.double() - second.double()).abs() <= limit * second.double().abs().clamp_min(1.0)).all())
