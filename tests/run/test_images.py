"""Images of a run's data set, also of a data set that the user registers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cifar_lit.base.errors import Failure, UsageError
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.settings import DataSettings
from cifar_lit.data.sources import SOURCES, Source
from cifar_lit.inference.model_file import ModelCard
from cifar_lit.run.images import run_image_data, run_images, run_or_drawn_images

CARD = ModelCard("lenet", 1.0, [3, 8, 8], ["a", "b"], [0.5] * 3, [0.2] * 3)


def stripes(settings: DataSettings, train: bool) -> ImageSet:
    count = 40 if train else 10
    images = torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 8, 8, 3).contiguous()
    return ImageSet(images, torch.arange(count) % 2, ("a", "b"))


def test_a_registered_data_set_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "stripes", Source(stripes))
    without_config = run_image_data(tmp_path, CARD, dataset="stripes")
    (tmp_path / "config.yaml").write_text("data: {dataset: stripes, val_size: 10}\n")
    sample = run_images(tmp_path, CARD, None, train=False, count=5)
    assert sample.images[:, 0, 0, 0].tolist() == [0, 2, 4, 6, 8]  # evenly spread
    assert (sample.images.shape, sample.what) == ((5, 3, 8, 8), "5 test images of stripes")
    for data, val_size in ((without_config, 0), (run_image_data(tmp_path, CARD), 10)):
        assert (len(data.train_images), len(data.test_images), data.classes) == (40, 10, ("a", "b"))
        assert len(data.split[1]) == val_size


def test_training_images_exclude_the_validation_images_of_the_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_validation(settings: DataSettings, train: bool) -> ImageSet:
        return replace(stripes(settings, train), val_rows=range(30, 40) if train else None)

    monkeypatch.setitem(SOURCES, "stripes", Source(with_validation))
    (tmp_path / "config.yaml").write_text("data: {dataset: stripes}\n")
    sample = run_images(tmp_path, CARD, None, train=True, count=0)
    assert sample.images[:, 0, 0, 0].tolist() == list(range(30))


@pytest.mark.parametrize("group", ["augment", "split", "images"])
def test_a_class_named_in_a_group_of_settings_of_a_config_is_not_imported(
    group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostile_augment.py").write_text("class Augment: ...")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "config.yaml").write_text(
        f"data: {{dataset: shapes, {group}: {{class_path: hostile_augment.Augment}}}}\n"
    )
    with pytest.raises(UsageError, match=rf"data\.{group} has no setting 'class_path'"):
        run_image_data(tmp_path, CARD)
    assert "hostile_augment" not in sys.modules


def test_missing_images_are_generated_and_not_downloaded(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"data: {{dataset: cifar10, root: {tmp_path}}}\n")
    reason = f"the images of cifar10 are missing in {tmp_path}: give their folder with --data-dir"
    with pytest.raises(Failure, match=reason):
        run_images(tmp_path, CARD, None, train=True, count=0)
    drawn = run_or_drawn_images(tmp_path, CARD, None, 7)
    assert (drawn.images.shape, drawn.labels) == ((7, 3, 8, 8), None)
    assert drawn.what == f"7 generated images without labels ({reason})"
