"""Images of a run's data set, also of a data set that the user registers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from contract.command_line import draw_folder

from cifar_lit.base.errors import UsageError
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.settings import DataSettings
from cifar_lit.data.sources import SOURCES, Source
from cifar_lit.inference.model_file import ModelCard
from cifar_lit.run.images import run_image_data

CARD = ModelCard("lenet", 1.0, [3, 8, 8], ["a", "b"], [0.5] * 3, [0.2] * 3)


def stripes(settings: DataSettings, train: bool) -> ImageSet:
    count = 40 if train else 10
    images = torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 8, 8, 3).contiguous()
    return ImageSet(images, torch.arange(count) % 2, ("a", "b"))


def test_a_registered_data_set_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "stripes", Source(stripes))
    (tmp_path / "config.yaml").write_text("data: {dataset: stripes, val_size: 10}\n")
    data = run_image_data(tmp_path, CARD)
    assert (len(data.train_images), len(data.test_images), data.classes) == (40, 10, ("a", "b"))
    assert len(data.split[1]) == 10


def test_images_of_new_classes_are_left_out_whatever_the_names_of_the_others(working_folder: Path) -> None:
    known = ("'b'", "[a]", "nan", "x|y")
    draw_folder(Path("own"), dict.fromkeys((*known, "c"), 4), 8)
    Path("config.yaml").write_text("data: {dataset: folder, root: own, images: {image_size: 8}}\n")
    assert run_image_data(Path(), replace(CARD, classes=[*known])).classes == known


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
