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

TIMES = ("train_seconds", "images_per_second")  # of metrics.json
NOT_RESULTS = (".lock", ".owner", ".job")  # a lock that a kill in the last moment left, and who started the run
CLOCKS = ("seconds", "validation")  # of checkpoints
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

    Times differ always and do not count; nor do the paths that a checkpoint holds, but for their last part. With a
    `tolerance`, for a run that went on with another number of processes, fractions may differ by it, absolutely or, above 1,
    relatively, and `NOT_ROUNDED` does not count.
    """
    apart = NOT_ROUNDED if tolerance else ()
    places = []
    for name in ("last.ckpt", "best.ckpt"):
        first, second = (comparable(read_checkpoint(each / "checkpoints" / name), apart) for each in (run, expected))
        places += [f"{name}: {path}" for path in unequal(first, second, tolerance=tolerance)]
    kept, whole = (comparable(_model(each / "model.safetensors"), apart) for each in (run, expected))
    places += [f"model.safetensors: {path}" for path in unequal(kept, whole, tolerance=tolerance)]
    for name in ("metrics.csv", "predictions.csv"):
        left, right = (_table(each / name, parsed=tolerance > 0) for each in (run, expected))
        if unequal(left, right, tolerance=tolerance):
            places.append(name)
    left, right = (json.loads((each / "metrics.json").read_text()) for each in (run, expected))
    places += [
        f"metrics.json: {name}"
        for name in right
        if name not in (*TIMES, *apart) and (name not in left or unequal(left[name], right[name], tolerance=tolerance))
    ]
    names = [
        {path.relative_to(each).as_posix() for path in each.rglob("*") if path.is_file() and "tfevents" not in path.name}
        for each in (run, expected)
    ]
    return places + [f"file {name}" for name in sorted(names[0] ^ names[1]) if name not in NOT_RESULTS]


def _model(file: Path) -> dict[str, Any]:
    """Card and tensors of a model.safetensors, so that a difference has a name; empty where there is none."""
    if not file.exists():
        return {}
    with safe_open(file, "pt") as opened:
        metadata = {name: text for name, text in opened.metadata().items() if name != "sha256"}  # which follows from the rest
        card = {name: json.loads(text) if name == "card" else text for name, text in metadata.items()}
        return {"": card, **{name: opened.get_tensor(name) for name in opened.keys()}}  # noqa: SIM118 (no mapping)


def _table(path: Path, parsed: bool) -> Any:
    """A table's bytes or, parsed, its rows with numbers where there are such; None where there is none."""
    if not path.exists():
        return None
    if not parsed:
        return path.read_bytes()
    with path.open(newline="") as file:
        return [[_number(cell) for cell in row] for row in csv.reader(file)]


def _number(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell


def comparable(value: Any, apart: tuple[str, ...] = ()) -> Any:
    """A checkpoint's contents without the times and the keys in `apart`, and with the last part of each path in its place."""
    if isinstance(value, dict):
        return {comparable(key): comparable(inner, apart) for key, inner in value.items() if key not in (*CLOCKS, *apart)}
    if isinstance(value, list | tuple):
        return [comparable(inner, apart) for inner in value]
    return value.rpartition("/")[2] if isinstance(value, str) else value


def unequal(first: Any, second: Any, path: str = "", tolerance: float = 0.0) -> list[str]:
    """Where two nested values differ: tensors and fractions by more than `tolerance`, for 0 in any bit; all else at all."""
    if isinstance(first, dict) and isinstance(second, dict):
        alone = [f"{path}.{key}" for key in first.keys() ^ second.keys()]
        shared = sorted(first.keys() & second.keys(), key=str)
        return alone + [place for key in shared for place in unequal(first[key], second[key], f"{path}.{key}", tolerance)]
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
