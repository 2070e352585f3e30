"""The `data` entry of metrics.json: which images a run was trained on, and how the data of two runs differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cifar_lit.data.table import SUFFIXES, read_table
from cifar_lit.errors import UsageError

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData

UNUSED, TRAIN, VAL, TEST = range(4)


def data_record(data: ImageData) -> dict[str, Any]:
    """Return SHA-256 fingerprints of images, labels and split, and the numbers of images and classes.

    Each image is identified by its pixels. So a fingerprint does not depend on the order, names or place of the files,
    and other labels change only that of the labels, unless a split by seed changes with them.
    """
    train, val = data.split
    part = torch.full((len(data.train_images),), UNUSED)
    part[train], part[val] = TRAIN, VAL
    sets = [(data.train_images, part)]
    if data.parts.folds:  # the test images are among the training images
        part[data.parts.fold_rows] = TEST
    else:
        sets.append((data.test_images, torch.full((len(data.test_images),), TEST)))
    columns: dict[str, list[np.ndarray]] = {"images": [], "labels": [], "split": []}  # uint64 (N,), a key per image
    for image_set, parts in sets:
        names = _keys([name.encode() for name in image_set.classes])
        for rows in torch.arange(len(image_set)).split(4096):  # in parts, because the images may be memory-mapped
            columns["images"].append(_keys(image_set.take(rows).flatten(1).numpy()))
            columns["labels"].append(names[image_set.labels[rows].numpy()])
            columns["split"].append(parts[rows].numpy().astype(np.uint64))
    keys = {name: np.concatenate(parts) for name, parts in columns.items()}
    pairs = {name: np.stack([keys["images"], column]) for name, column in keys.items()}
    hashes = {name: sha256(pair[:, np.lexsort(pair[::-1])].tobytes()).hexdigest() for name, pair in pairs.items()}
    counts = {"train": len(train), "val": len(val), "test": int((sets[-1][1] == TEST).sum())}
    return {**hashes, **counts, "classes": data.class_count}


def _keys(items: Iterable[Any]) -> np.ndarray:
    """Return a hash of each item, an array or bytes, as uint64 (N,)."""
    return np.frombuffer(b"".join(sha256(item).digest()[:8] for item in items), np.uint64)


def data_differences(runs: Sequence[Any]) -> list[str]:
    """Return a line for each data set on which some of these `RunRecord`s were trained, compared with the first run."""
    by_data: dict[str, Any] = {}
    for run in runs:
        if isinstance(record := run.metrics.get("data"), dict):
            by_data.setdefault(f"{record} {run.test.get('fingerprint')}", run)
    records = list(by_data.values())
    what = "were trained on different data"
    return [f"{records[0].name} and {run.name} {what}: {_difference(records[0], run)}" for run in records[1:]]


def _difference(first: Any, second: Any) -> str:
    """Return what differs, as a list of words. With other images, their labels and split cannot be compared."""
    one, other = (run.metrics["data"] for run in (first, second))
    counts = "{} and {} for training".format(*(record.get("train") for record in (one, other)))
    if one.get("images") != other.get("images"):
        differing = [f"images ({counts})"]
    else:
        changed = _changed_labels(*(run.settings.get("data.root") for run in (first, second)))
        labels = f"labels (of {changed} images)" if changed else "labels"
        names = {"labels": labels, "split": f"split ({counts})"}
        differing = [text for name, text in names.items() if one.get(name) != other.get(name)]
    if first.test.get("fingerprint") != second.test.get("fingerprint"):
        differing.append("test set")
    return ", ".join(differing) or "number of classes"


def _changed_labels(first: object, second: object) -> int | None:
    """Return the number of images with another label, if both roots are tables that can be read, else None."""
    tables: list[Mapping[str, str]] = []
    for root in (first, second):
        with suppress(UsageError, OSError, ValueError):
            path = Path(str(root)).expanduser()
            if path.suffix.lower() in SUFFIXES and path.is_file():
                tables.append({row.path: row.label for row in read_table(path)})
    return sum(tables[1].get(path, label) != label for path, label in tables[0].items()) if len(tables) == 2 else None
