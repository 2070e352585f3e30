"""`SplitImages` alone: its three parts, folds, and what the data set itself decides."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cifar_lit.data.sources import SourceSettings
from cifar_lit.data.split_images import SplitImages
from cifar_lit.errors import UsageError

SETTINGS = SourceSettings(image_size=8, count=60, split_seed=3)


def test_nothing_is_drawn_before_it_is_asked_for_and_each_part_once() -> None:
    parts = SplitImages("shapes", SETTINGS, val_size=10)
    assert not {"train_images", "test_images", "split"} & vars(parts).keys()
    assert (len(parts.test_images), "train_images" in vars(parts)) == (12, False)
    assert [len(rows) for rows in parts.split] == [50, 10] and parts.train_images is parts.train_images
    assert int(parts.class_counts.sum()) == 50


def test_each_image_is_in_the_test_set_of_one_fold_and_never_trained_on_there() -> None:
    folds = [SplitImages("shapes", SETTINGS, val_size=6, folds=3, fold=fold) for fold in range(3)]
    assert sorted(row for parts in folds for row in parts.fold_rows.tolist()) == list(range(60))
    for parts in folds:
        train, val = parts.split
        assert sorted([*train.tolist(), *val.tolist(), *parts.fold_rows.tolist()]) == list(range(60))
        assert torch.equal(parts.test_images.images, parts.train_images.images[parts.fold_rows])
        assert parts.settings.test_size is None  # no image is set apart for good
    for wrong in ({"folds": 1}, {"folds": 3, "fold": 3}, {"folds": 3, "fold": -1}):
        with pytest.raises(UsageError, match="use 2 folds or more, counted from 0"):
            SplitImages("shapes", SETTINGS, **wrong)


def test_validation_images_of_the_data_set_take_the_place_of_drawn_ones(capsys: pytest.CaptureFixture[str]) -> None:
    parts = SplitImages("shapes", replace(SETTINGS, root="given"), val_size=0)
    parts.train_images = replace(parts.train_images, val_rows=range(50, 60))
    assert parts.split[1].tolist() == list(range(50, 60)) and parts.split[0].tolist() == list(range(50))
    assert "given: data.val_size 0 is ignored" in capsys.readouterr().err
