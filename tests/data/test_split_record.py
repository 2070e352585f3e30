"""A resumed or evaluated training keeps its own split, whatever happened to the folder or table of its images."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from grouped import grouped
from own_images import damage, save_photo

from cifar_lit.base.errors import UsageError
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.settings import Split
from cifar_lit.data.sources import SOURCES, Source
from cifar_lit.training.classifier import ImageClassifier


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Return a folder with 30 images of each of two classes."""
    for seed in range(60):
        save_photo(tmp_path / f"photos/{('ant', 'bee')[seed % 2]}/{seed:02}.png", seed)
    return tmp_path / "photos"


def own_data(root: Path, **settings: Any) -> ImageData:
    sizes = {"image_size": 8, "val_size": 0.2, "batch_size": 8}
    return ImageData("folder", str(root), **grouped({**sizes, **settings}))


def sides(data: ImageData) -> dict[str, list[str]]:
    """Return the names of the images on each side."""
    images, (train, val) = data.train_images, data.split
    names = images.names or ()
    return {
        "train": [names[row] for row in train],
        "val": [names[row] for row in val],
        "test": [*(data.test_images.names or ())],
    }


def add_images(root: Path) -> None:
    """Add images to a class, a class, a damaged image, and an empty one."""
    for seed in range(100, 140):
        save_photo(root / f"bee/{seed}.png", seed)
        save_photo(root / f"wasp/{seed}.png", seed + 100)
    damage(save_photo(root / "ant/x.png", 300))
    (root / "ant/y.png").touch()


def write_table(root: Path, column: str = "", value: Callable[[str], str] = str) -> Path:
    """Write a table of all images next to their folder."""
    names = sorted(str(path.relative_to(root.parent)) for path in root.rglob("*.png"))
    rows = [f"{name},{Path(name).parent.name}" + (f",{value(name)}" if column else "") for name in names]
    table = root.parent / "table.csv"
    table.write_text("\n".join(["path,label" + (f",{column}" if column else ""), *rows, ""]))
    return table


# ---- images that were added


def test_added_images_and_classes_change_no_side(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, resumed = own_data(photos), own_data(photos)
    before, state = sides(data), data.state_dict()
    assert {side: len(names) for side, names in before.items()} == {"train": 38, "val": 10, "test": 12}
    add_images(photos)
    resumed.load_state_dict(state)
    assert (sides(resumed), resumed.classes) == (before, ("ant", "bee"))
    assert resumed.state_dict() == state | {"split": resumed.keep_record()}
    assert "photos: this run does not use 82 images added since it began" in capsys.readouterr().err


def test_images_that_were_loaded_before_the_checkpoint_are_replaced(photos: Path) -> None:
    """A plain Trainer builds the net from the images before it reads the checkpoint."""
    data, resumed = own_data(photos), own_data(photos)
    before, state = sides(data), data.state_dict()
    save_photo(photos / "bee/99.png", 99)
    assert len(resumed.train_loader.indices) + len(resumed.split[1]) + len(resumed.test_images) == 61
    resumed.load_state_dict(state)
    assert sides(resumed) == before
    assert resumed.statistics == data.statistics
    assert sorted(torch.cat([batch.indices for batch in resumed.train_loader]).tolist()) == data.split[0].tolist()


@pytest.mark.parametrize("split", [{"folds": 3, "fold": 1}, {"share": 0.5}], ids=str)
def test_folds_and_shares_stay_the_same(split: dict[str, Any], photos: Path) -> None:
    data = own_data(photos, split=Split(**split))
    before, state = sides(data), data.state_dict()
    add_images(photos)
    (resumed := own_data(photos, split=Split(**split))).load_state_dict(state)
    assert sides(resumed) == before


# ---- images that were changed


def rename_all(root: Path) -> None:
    """Give each image of a class the name of the next one."""
    for path in sorted((root / "bee").iterdir(), reverse=True):
        path.rename(path.with_name(f"{int(path.stem) + 2:02}.png"))
    shutil.copy(root / "bee/61.png", root / "bee/01.png")


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "removed": (lambda root: (root / "bee/01.png").unlink(), r"missing \(1 of 60\): bee/01.png"),
    "moved": (lambda root: (root / "bee/01.png").rename(root / "ant/01.png"), r"missing \(1 of 60\): bee/01.png"),
    "replaced": (lambda root: save_photo(root / "bee/01.png", 99), r"have changed \(1 of 60\): bee/01.png"),
    "renamed": (rename_all, r"have changed \(30 of 60\): bee/01.png, bee/03.png, bee/05.png"),
    "class removed": (lambda root: shutil.rmtree(root / "ant"), "one class only"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_images_that_are_missing_or_changed_are_refused_by_name(change: str, photos: Path) -> None:
    state = own_data(photos).state_dict()
    act, text = CHANGES[change]
    act(photos)
    with pytest.raises(UsageError, match=text):
        own_data(photos).load_state_dict(state)


def test_other_labels_or_groups_in_a_table_are_refused(photos: Path) -> None:
    table = write_table(photos, "group", lambda name: name)
    state = own_data(table).state_dict()
    text = table.read_text()
    table.write_text(text.replace("photos/bee/01.png,bee", "photos/bee/01.png,ant"))
    with pytest.raises(UsageError, match=r"have changed \(1 of 60\): photos/bee/01.png\. Restore"):
        own_data(table).load_state_dict(state)
    write_table(photos, "group", lambda name: name[-5])  # ten large groups
    with pytest.raises(UsageError, match=r"would change sides .*photos/"):
        own_data(table).load_state_dict(state)


def test_other_images_of_a_function_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def source(first: int) -> Source:
        pixels = torch.arange(first, first + 40, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 4, 4, 3).contiguous()
        return Source(lambda settings, train: ImageSet(pixels, torch.arange(len(pixels)) % 2, ("a", "b")))

    monkeypatch.setitem(SOURCES, "mine", source(0))
    state = ImageData("mine").state_dict()
    ImageData("mine").load_state_dict(state)
    monkeypatch.setitem(SOURCES, "mine", source(1))
    with pytest.raises(UsageError, match="the images of mine, or their order, differ"):
        ImageData("mine").load_state_dict(state)


# ---- settings


def changes_since(state: dict[str, Any], data: ImageData) -> dict[str, object]:
    """Return the settings of data that differ from those in a state."""
    return ImageClassifier().changes_since({"cifar_lit": {"settings": "{}"}, "ImageData": state}, data)


def test_the_place_of_the_images_and_their_loading_may_change(photos: Path) -> None:
    data = own_data(photos)
    before, state = sides(data), data.state_dict()
    moved = photos.rename(photos.with_name("moved"))
    mean, std = data.statistics
    other = own_data(moved, workers=1, placement="host", eval_batch_size=3, mean=mean, std=std)
    assert changes_since(state, other)
    other.load_state_dict(state)
    assert sides(other) == before


# ---- evaluation


def test_an_evaluation_uses_the_split_of_the_training(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = own_data(photos)
    before, state = sides(data), data.state_dict()
    add_images(photos)
    (evaluated := own_data(photos, cache_dir=str(photos.parent / "other"))).evaluate_split_of(state)
    assert sides(evaluated) == before
    assert "too high" not in capsys.readouterr().err
    for changed in ({"split": Split(seed=7)}, {"val_size": 0.3}):
        own_data(photos, **changed).evaluate_split_of(state)
        assert "scores may be too high, because images or their split have changed" in capsys.readouterr().err
    (photos / "bee/01.png").unlink()
    own_data(photos).evaluate_split_of(state)
    assert "have changed: images of this run are missing (1 of" in capsys.readouterr().err


def test_an_evaluation_on_other_classes_is_refused(photos: Path) -> None:
    """A class that was renamed changes the order of the labels, so that the score means nothing."""
    state = own_data(photos).state_dict()
    for name, new in {"bee": "fly", "ant": "wasp"}.items():
        (photos / name).rename(photos / new)
        with pytest.raises(UsageError, match=r"trained on other classes \(ant, bee\) than these"):
            own_data(photos).evaluate_split_of(state)
