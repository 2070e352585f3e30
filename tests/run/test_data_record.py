"""The fingerprint of a run's data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from contract.command_line import draw_folder

from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.settings import Split
from cifar_lit.data.split import SplitImages
from cifar_lit.run.results import data_record

HASHES = ("images", "labels", "split")


def record(**settings: Any) -> dict[str, Any]:
    return data_record(ImageData(**{"dataset": "folder", "root": "animals", "val_size": 4, **settings}))


def same(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    return [name for name in HASHES if first[name] == second[name]]


@pytest.fixture
def animals(working_folder: Path) -> dict[str, Any]:
    """Draw 30 images and return the record of their data."""
    draw_folder(Path("animals"), {"cat": 15, "dog": 15})
    return record()


def test_the_record_counts_images_and_depends_on_pixels_labels_and_split(animals: dict[str, Any]) -> None:
    assert {name: animals[name] for name in ("train", "val", "test", "classes")} == {
        "train": 20, "val": 4, "test": 6, "classes": 2,
    }  # fmt: skip
    assert record() == animals
    for settings in ({"split": Split(seed=1)}, {"val_size": 6}, {"split": Split(share=0.5)}):
        assert same(animals, record(**settings)) == ["images", "labels"], settings
    assert same(animals, record(images={"image_size": 8})) == []
    folds = [record(split=Split(folds=5, fold=fold)) for fold in (0, 1)]
    assert same(animals, folds[0]) == same(*folds) == ["images", "labels"] and folds[0]["test"] == 6


def test_a_run_without_test_images_has_a_record(animals: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(parts: SplitImages) -> None:
        raise FileNotFoundError("no test images")

    monkeypatch.setattr(SplitImages, "test_images", property(fail))
    assert [record()[name] for name in ("train", "val", "test")] == [20, 4, 0]


def test_order_names_and_place_of_the_files_do_not_matter(animals: dict[str, Any]) -> None:
    Path("animals").rename("pets")
    for number in range(15):
        Path(f"pets/cat/{number}.png").rename(f"pets/cat/{99 - number}.png")
    assert same(animals, record(root="pets")) == ["images", "labels"]  # the split by seed depends on the names


def test_a_table_with_other_labels_changes_only_the_fingerprint_of_the_labels(animals: dict[str, Any]) -> None:
    def split(number: int) -> str:
        return "test" if number < 3 else "val" if number < 6 else "train"

    for name, relabelled in (("labels.csv", 0), ("labels-reviewed.csv", 2)):
        rows = [
            f"animals/{kind}/{number}.png,{'dog' if number < relabelled else kind},{split(number)}"
            for kind in ("cat", "dog")
            for number in range(15)
        ]
        Path(name).write_text("\n".join(["path,label,split", *rows]) + "\n")
    first, reviewed = (record(root=name) for name in ("labels.csv", "labels-reviewed.csv"))
    assert same(animals, first) == ["images", "labels"]
    assert same(first, reviewed) == ["images", "split"]
