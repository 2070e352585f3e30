"""`data.labels TABLE`: reviewed labels of data sets that are not files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from cifar_lit.base.errors import UsageError
from cifar_lit.data.datamodule import ImageData

SETTINGS: dict[str, Any] = {"dataset": "shapes", "val_size": 0}
IMAGES = {"image_size": 16, "num_classes": 4, "count": 12}


def test_labels_split_dropped_and_new_images_follow_the_table(tmp_path: Path) -> None:
    plain = ImageData(**SETTINGS, images=IMAGES)
    one, two, *_ = plain.classes
    Image.new("RGB", (40, 40), "red").save(tmp_path / "red.png")
    rows = [f"7,{one},val", f"3,{two},train", f"red.png,{two},train", f"0,{one},val", f"5,{one},"]
    (tmp_path / "table.csv").write_text("\n".join(["image,label,split", *rows]))
    data = ImageData(**SETTINGS, images={**IMAGES, "labels": str(tmp_path / "table.csv")})
    images = data.train_images
    assert images.names == ["3", str(tmp_path / "red.png"), "5", "7", "0"]  # the next table lies elsewhere
    assert torch.equal(images.images[[0, 2, 3, 4]], plain.train_images.images[[3, 5, 7, 0]])
    assert images.images[1].unique(dim=0).flatten(0, 1).unique(dim=0).tolist() == [[255, 0, 0]]
    assert images.labels.tolist() == [1, 1, 0, 0, 0]
    assert [rows.tolist() for rows in data.split] == [[0, 1, 2], [3, 4]]
    assert torch.equal(data.test_images.images, plain.test_images.images)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ("1,sqare,train", "row 3: the data set has no class 'sqare'. Did you mean square?"),
        ("1,circle,test", "row 3: the split 'test' is neither train nor val"),
        ("0,circle,train", "row 3: image 0 is in a row above"),
        ("00,circle,val", "row 3: image 0 is in a row above"),
    ],
)
def test_an_invalid_row_is_named(tmp_path: Path, row: str, text: str) -> None:
    names = ImageData(**SETTINGS, images=IMAGES).classes
    (tmp_path / "table.csv").write_text(f"image,label,split\n0,{names[0]},train\n{row.replace('circle', names[0])}")
    with pytest.raises(UsageError) as error:
        ImageData(**SETTINGS, images={**IMAGES, "labels": str(tmp_path / "table.csv")}).train_images  # noqa: B018
    assert text.replace("circle", names[0]) in str(error.value)


def test_own_images_take_no_table_of_labels(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"leave data\.labels out"):
        ImageData("folder", root=str(tmp_path), images={"labels": "table.csv"}).train_images  # noqa: B018
