"""`data.split.share`: stratified, nested shares of the training images."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.settings import Split

SHARES = (0.01, 0.25, 0.5, 0.75, 1.0)


@pytest.mark.parametrize("val_size", [0, 0.1])
def test_shares_are_nested_stratified_and_leave_validation_and_test_images_alone(val_size: float) -> None:
    images = {"image_size": 8, "count": 200, "num_classes": 7}
    settings: dict[str, Any] = {"dataset": "shapes", "val_size": val_size, "images": images}
    whole = ImageData(**settings)
    smaller: set[int] = set()
    for share in SHARES:
        data = ImageData(**settings, split=Split(share=share))
        train, val = data.split
        assert torch.equal(val, whole.split[1]) and torch.equal(data.test_images.labels, whole.test_images.labels)
        rows = set(train.tolist())
        assert smaller <= rows and len(rows) == len(train) >= 7
        counts = data.class_counts / whole.class_counts
        assert share == 0.01 or bool(((counts - share).abs() < 0.05).all()), counts
        smaller = rows
    assert torch.equal(train, whole.split[0])
