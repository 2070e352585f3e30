"""`data.labels TABLE`: reviewed labels of data sets that are not files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cifar_lit.base.errors import UsageError
from cifar_lit.data.datamodule import ImageData

SETTINGS: dict[str, Any] = {"dataset": "shapes", "val_size": 0}
IMAGES = {"image_size": 16, "num_classes": 4, "count": 12}


def test_labels_split_and_dropped_images_follow_the_table(tmp_path: Path) -> None:
    plain = ImageData(**SETTINGS, images=IMAGES)
    one, two, *_ = plain.classes
    rows = [f"7,{one},val", f"03,{two},train", f"0,{one},val", f"5,{one},"]
    (tmp_path / "table.csv").write_text("\n".join(["image,label,split", *rows]))
    data = ImageData(**SETTINGS, images={**IMAGES, "labels": str(tmp_path / "table.csv")})
    images = data.train_images
    assert images.names == ["3", "5", "7", "0"]
    assert torch.equal(images.images, plain.train_images.images[[3, 5, 7, 0]])
    assert images.labels.tolist() == [1, 0, 0, 0]
    assert [rows.tolist() for rows in data.split] == [[0, 1], [2, 3]]
    assert torch.equal(data.test_images.images, plain.test_images.images)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ("1,sqare,train", "row 3: the data set has no class 'sqare'. Did you mean square?"),
        ("1,circle,test", "row 3: the split 'test' is neither train nor val"),
        ("12,circle,train", "row 3: the data set has no image 12"),
        ("red.png,circle,train", "row 3: the data set has no image red.png"),
        ("0,circle,train", "row 3: image 0 is in another row"),
        ("00,circle,val", "row 3: image 0 is in another row"),
    ],
)
def test_an_invalid_row_is_named(tmp_path: Path, row: str, text: str) -> None:
    names = ImageData(**SETTINGS, images=IMAGES).classes
    (tmp_path / "table.csv").write_text(f"image,label,split\n0,{names[0]},train\n{row.replace('circle', names[0])}")
    with pytest.raises(UsageError) as error:
        ImageData(**SETTINGS, images={**IMAGES, "labels": str(tmp_path / "table.csv")}).train_images  # noqa: B018
    assert text.replace("circle", names[0]) in str(error.value)


def test_own_images_take_no_table_of_labels(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"leave data\.labels out; a table of own images is named by --data-dir"):
        ImageData("folder", root=str(tmp_path), images={"labels": "table.csv"}).train_images  # noqa: B018
