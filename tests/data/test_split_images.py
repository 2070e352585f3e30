"""`SplitImages`: its three parts, folds, and validation sets given by the data set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.sources import SourceSettings
from cifar_lit.data.split_images import SplitImages
from cifar_lit.data.splits import Split
from cifar_lit.errors import UsageError

SETTINGS = SourceSettings(image_size=8, count=60, split=Split(seed=3))


def test_each_part_is_loaded_once_on_first_access() -> None:
    parts = SplitImages("shapes", SETTINGS, val_size=10)
    assert not {"train_images", "test_images", "split"} & vars(parts).keys()
    assert (len(parts.test_images), "train_images" in vars(parts)) == (12, False)
    assert [len(rows) for rows in parts.split] == [50, 10] and parts.train_images is parts.train_images
    assert int(parts.class_counts.sum()) == 50


def test_each_image_is_in_the_test_set_of_exactly_one_fold() -> None:
    splits = [Split(seed=3, folds=3, fold=fold) for fold in range(3)]
    folds = [SplitImages("shapes", replace(SETTINGS, split=split), val_size=6) for split in splits]
    assert sorted(row for parts in folds for row in parts.fold_rows.tolist()) == list(range(60))
    for parts in folds:
        train, val = parts.split
        assert sorted([*train.tolist(), *val.tolist(), *parts.fold_rows.tolist()]) == list(range(60))
        assert torch.equal(parts.test_images.images, parts.train_images.images[parts.fold_rows])
    for wrong in ({"folds": 1}, {"folds": 3, "fold": 3}, {"folds": 3, "fold": -1}):
        with pytest.raises(UsageError, match="use 2 folds or more, counted from 0"):
            Split(**wrong)


def test_a_given_validation_set_replaces_the_random_one(capsys: pytest.CaptureFixture[str]) -> None:
    parts = SplitImages("shapes", replace(SETTINGS, root="given"), val_size=0)
    parts.train_images = replace(parts.train_images, val_rows=range(50, 60))
    assert parts.split[1].tolist() == list(range(50, 60)) and parts.split[0].tolist() == list(range(50))
    assert "given: data.val_size 0 is ignored" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"sed": 3}, r"data\.split has no setting 'sed'\. Did you mean seed\?"),
        ({"fold": 0.5}, r"data\.split\.fold must be a whole number, not 0\.5"),
        ({"share": "half"}, r"data\.split\.share must be a number, not 'half'"),
        ({"group": 3}, r"data\.split\.group must be text, not 3"),
        ("seed", r"data\.split must hold settings by name, not 'seed'"),
    ],
)
def test_invalid_settings_of_the_split_are_refused_by_name(settings: Any, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        ImageData("shapes", split=settings)
