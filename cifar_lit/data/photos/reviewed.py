"""`data.labels TABLE`: labels from a table of `cifar-lit review`, for data sets that are not files."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch

from cifar_lit.base.errors import UsageError, nearest
from cifar_lit.base.files import as_on_disk
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.photos.decode import decode
from cifar_lit.data.photos.table import read_table


def with_reviewed_labels(images: ImageSet, table: Path) -> ImageSet:
    """Return training images with the labels and the split of a table. Images without a row are left out.

    Args:
        images: training images of a data set.
        table: the table, see `read_table`. The column `image` holds the row of an image, or the file of a new one. Rows
            with the split `val` become `val_rows`, at the end of the set.

    Raises:
        UsageError: a row has an unknown class, image or split, or repeats an image.
        DecodeError: a file cannot be read.
    """
    height, width, channels = images.images.shape[1:]
    files: list[torch.Tensor] = []
    parts: dict[str, dict[str, tuple[int, int]]] = {"train": {}, "val": {}}  # place and label by image
    for number, image, label, split, *_ in read_table(table):
        is_row = image.isdecimal()
        key = str(int(image)) if is_row else os.path.normpath(image)  # 7 and 07 are the same row
        fault = ""
        if label not in images.classes:
            fault = f"the data set has no class {label!r}.{nearest(label, images.classes)}"
        elif split not in ("", *parts):
            fault = f"the split {split!r} is neither train nor val"
        elif key in parts["train"] or key in parts["val"]:
            fault = f"image {key} is in a row above"
        if fault:
            raise UsageError(f"{table}, row {number}: {fault}")
        place = int(image) if is_row else len(images) + len(files)
        if not is_row:
            file = as_on_disk(key, str(table.parent))
            files.append(torch.from_numpy(decode(file, (height, width), channels)))
        parts[split or "train"][key] = place, images.classes.index(label)
    rows = {**parts["train"], **parts["val"]}
    places, labels = torch.tensor([*rows.values()]).T.contiguous()
    pixels = torch.cat([images.images, torch.stack(files)]) if files else images.images
    val = range(len(parts["train"]), len(rows)) if parts["val"] else None
    names = [name if name.isdecimal() else str((table.parent / name).absolute()) for name in rows]
    return replace(images, images=pixels[places], labels=labels, val_rows=val, groups=None, mapped=False, names=names)
