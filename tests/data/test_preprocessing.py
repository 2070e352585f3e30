"""`Preprocessing` without a datamodule. test_datamodule and test_augment test its batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from cifar_lit.data.augment import Augment
from cifar_lit.data.preprocessing import Preprocessing, shrink
from cifar_lit.data.sources import SourceSettings
from cifar_lit.data.split_images import SplitImages
from cifar_lit.errors import UsageError

SQUARES = [*((32, 32, side, side) for side in (4, 16, 20, 31, 32)), (28, 28, 21, 21)]
RECTANGLES = [(64, 48, 32, 24), (48, 64, 24, 32), (30, 45, 20, 30), (9, 7, 5, 4), (256, 64, 16, 4)]


def preprocessing(**settings: Any) -> Preprocessing:
    parts = SplitImages("shapes", SourceSettings(image_size=8, count=40), val_size=10)
    return Preprocessing(parts, **{"mean": 0.5, "std": 0.25, **settings})


def test_settings_that_do_not_fit_the_size_of_the_images_are_refused() -> None:
    with pytest.raises(UsageError, match=r"data\.augment\.blur"):
        preprocessing(augment=Augment(blur=50.0)).check()


@pytest.mark.parametrize(("height", "width", "side", "across"), [*SQUARES, *RECTANGLES])
@pytest.mark.parametrize("channels", [1, 3])
def test_shrink_equals_area_interpolation(height: int, width: int, side: int, across: int, channels: int) -> None:
    images = torch.randint(0, 256, (7, height, width, channels), dtype=torch.uint8)
    before, small = images.clone(), shrink(images, side)
    assert small.dtype == torch.float32 and torch.equal(images, before)
    expected = F.interpolate(images.permute(0, 3, 1, 2).double(), (side, across), mode="area").permute(0, 2, 3, 1)
    torch.testing.assert_close(small.double(), expected, rtol=0, atol=1e-4)
