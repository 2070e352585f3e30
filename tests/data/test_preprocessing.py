"""`Preprocessing` without a datamodule. test_datamodule and test_augment test its batches."""

from __future__ import annotations

from typing import Any

import pytest

from cifar_lit.data.augment import Augment
from cifar_lit.data.preprocessing import Preprocessing
from cifar_lit.data.sources import SourceSettings
from cifar_lit.data.split_images import SplitImages
from cifar_lit.errors import UsageError


def preprocessing(**settings: Any) -> Preprocessing:
    parts = SplitImages("shapes", SourceSettings(image_size=8, count=40), val_size=10)
    return Preprocessing(parts, **{"mean": 0.5, "std": 0.25, **settings})


def test_settings_that_do_not_fit_the_size_of_the_images_are_refused() -> None:
    preprocessing(resolutions={4: 0.5}).check()
    with pytest.raises(UsageError, match="a side of 12 pixels: use 4 … 8"):
        preprocessing(resolutions={12: 0.5}).check()
    with pytest.raises(UsageError, match=r"data\.augment\.blur"):
        preprocessing(augment=Augment(blur=50.0)).check()
