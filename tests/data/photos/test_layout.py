"""Layouts of folders that people have: names of parts, wrappers, missing classes, accents and system folders."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from own_images import open_set, save

from cifar_lit.base.errors import UsageError
from cifar_lit.data.photos.layout import Listing, part_of, scan

NFC, NFD = (lambda name: unicodedata.normalize("NFC", name)), (lambda name: unicodedata.normalize("NFD", name))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "set"


def fill(root: Path, *folders: str, count: int = 2) -> None:
    """Save images into each folder, whose grey values are their numbers."""
    for folder in folders:
        for number in range(count):
            save(root / folder / f"{number}.png", number)


def counts(listing: Listing) -> dict[str, dict[str, int]]:
    """Return the number of images of each class in each part."""
    return {part: {name: len(files) for name, files in tree.items()} for part, tree in listing.parts.items()}


PARTED = {"train": {"cat": 2, "dog": 2}, "test": {"cat": 2, "dog": 2}}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Training", "train"), ("TEST", "test"), ("Valid", "val"), ("dev_set", "val"), ("train_images", "train"),
        ("trainset", "train"), ("seg_train", "train"), ("test-multiple fruits", "test"),
        ("trains", None), ("latest", None), ("cat", None), ("invalid", None), ("train_test", None),
    ],
)  # fmt: skip
def test_names_of_folders_that_mean_a_part(name: str, expected: str | None) -> None:
    assert part_of(name) == expected


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("Training", "Testing"), ("seg_train/seg_train", "seg_test/seg_test"), ("TRAIN", "TEST"),
        ("train_set", "test_images"), ("dataset/train", "dataset/test"), ("a/b/Train/train", "a/b/Test/images"),
        ("train/animals", "test/animals"), ("asl_alphabet_train/asl_alphabet_train", "asl_alphabet_test"),
    ],
)  # fmt: skip
def test_usual_names_and_wrappers_of_parts_are_read(root: Path, train: str, test: str) -> None:
    fill(root, *(f"{part}/{name}" for part in (train, test) for name in ("cat", "dog")))
    assert counts(scan(root)) == PARTED
    paths = [file.path for file in scan(root).parts["train"]["cat"]]
    assert paths == [f"{train}/cat/0.png", f"{train}/cat/1.png"]


def test_a_wrapper_around_class_folders_is_followed_and_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(root, "PetImages/cat", "PetImages/dog")
    save(root / "logo.png")
    assert counts(scan(root)) == {"all": {"cat": 2, "dog": 2}}
    assert f"{root}: the images are those of PetImages/\n" in capsys.readouterr().err


def test_the_shortest_of_several_names_of_a_part_is_used(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in Fruits-360, whose test-multiple_fruits has other pictures."""
    fill(root, *(f"{part}/{name}" for part in ("training", "test", "a-test-of-many") for name in ("cat", "dog")))
    assert counts(scan(root)) == PARTED
    assert f"{root}: only test/ and training/ are used, not a-test-of-many\n" in capsys.readouterr().err


def test_classes_may_have_the_names_of_parts_or_folders_of_their_own(root: Path) -> None:
    fill(root, "test_station", "train_station", "valid", "cat/2023", "cat/2024", "dog/indoor", "dog/images", "fox/cat")
    assert [*scan(root).parts["all"]] == ["cat", "dog", "fox", "test_station", "train_station", "valid"]


def test_train_and_test_are_parts_also_beside_folders_of_other_images(root: Path) -> None:
    fill(root, "images", "train", "test")
    with pytest.raises(UsageError, match=r"images lie directly in .*train"):
        scan(root)


def test_the_classes_of_a_part_may_hold_the_same_folders(root: Path) -> None:
    for name in ("train/cat", "train/dog", "test/cat", "test/dog"):
        fill(root / name, "cam1", "cam2", count=1)
    assert counts(scan(root)) == PARTED


@pytest.mark.parametrize(
    ("folders", "text"),
    [
        (["train/cat", "train/dog", "eval/cat", "eval/dog"], "if train is a class like eval, rename its folder"),
        (["train/cat", "train/dog", "a/cat", "b/dog"], "if train is a class like a, b, rename its folder"),
        (
            ["entrenamiento/cat", "entrenamiento/dog", "prueba/cat", "prueba/dog"],
            r"hold the same folders \(cat, dog\), as parts do: rename the one with the training images to train/",
        ),
        (["eins/eins/cat", "eins/eins/dog", "zwei/zwei/cat", "zwei/zwei/dog"], r"hold the same folders \(cat, dog\)"),
        (["2023/cat", "2023/dog", "2023/hen", "2024/cat", "2024/dog"], r"hold the same folders \(cat, dog, hen\)"),
        (["cat/train", "cat/test", "dog/train", "dog/test"], "If they are classes, list the images in a table"),
        (["cat", "dog", "test/cat", "test/dog"], "test/ but no train/ .*; if test is a class like cat, dog, rename"),
        (["train/cat", "train/dog"], "train/ but no test/.*; to train and test .*: --data-dir .*set/train"),
        (["train/cat", "train/dog", "test/cat", "test/dgo"], r"only test/ has dgo; a class needs"),
        (
            ["train/cat", "train/dog", "test/images"],
            r"set/test has no class folders .*: cifar-lit classify RUN \S*set/test, .*: --data-dir \S*set/train",
        ),
        (["train/1", "train/2", "test/3", "test/4"], "only test/ has 3, 4; a class needs training images"),
        (["train/cat", "train/dog", "test"], "test has no class folders with images"),
        (["train/n01/images", "train/n02/images", "val/images"], "val has no class folders .* Tiny ImageNet, move"),
    ],
)  # fmt: skip
def test_other_layouts_are_refused_with_what_to_do(root: Path, folders: list[str], text: str) -> None:
    fill(root, *folders)
    with pytest.raises(UsageError, match=text) as refusal:
        scan(root)
    assert "\n" not in str(refusal.value)


def test_unlabelled_test_images_are_noted_if_there_is_a_validation_set(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(root, "train/cat", "train/dog", "val/cat", "val/dog", "test/unknown")
    assert [*scan(root).parts] == ["train", "val"]
    assert "predict them after the training: cifar-lit classify RUN" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["test", "val"])
def test_a_class_may_be_missing_from_a_held_out_part(root: Path, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    fill(root, "train/0", "train/90", "train/180", f"{part}/90", f"{part}/0")
    (root / part / "180").mkdir()
    images = open_set(root, train=False)
    assert images.classes == ("0", "90", "180") and images.labels.tolist() == [0, 0, 1, 1]
    assert f"{root}: no {part} images of class 180, so the scores leave it out\n" in capsys.readouterr().err


def test_folders_within_the_only_class_of_a_test_part_are_no_classes(root: Path) -> None:
    fill(root, "train/cat", "train/dog", "test/cat/2023", "test/cat/2024")
    assert counts(scan(root))["test"] == {"cat": 4, "dog": 0}


def test_stray_images_are_reported_and_left_out(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(root, "train/cat", "train/dog", "test/cat", "test/dog")
    for name in ("logo.png", "train/x.png", "test/y.png"):
        save(root / name)
    assert counts(scan(root)) == PARTED
    assert "3 images beside the class folders left out: train/x.png, test/y.png, logo.png\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    ["@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information", "lost+found", ".Trash-1000", "__MACOSX"],
)
def test_system_folders_are_skipped_and_counted(root: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    fill(root, "cat", "dog", name, f"cat/{name}", f"dog/more/{name}/0.png")
    assert counts(scan(root)) == {"all": {"cat": 2, "dog": 2}}
    assert f"{root}: 3 hidden or system folders skipped ({name})\n" in capsys.readouterr().err


@pytest.mark.parametrize(("first", "second"), [(NFC, NFD), (NFD, NFC)])
def test_composed_and_decomposed_names_are_one_class(root: Path, first: Callable, second: Callable) -> None:
    fill(root, *(f"train/{first(name)}" for name in ("Käse", "Brötchen")))
    fill(root, *(f"test/{second(name)}" for name in ("Käse", "Brötchen")))
    assert open_set(root).classes == open_set(root, train=False).classes == (NFC("Brötchen"), NFC("Käse"))
    save(root / "train" / second("Käse") / "9.png", 9)
    if len(list((root / "train").iterdir())) == 2:
        pytest.skip("the file system compares composed names")
    assert counts(scan(root))["train"] == {NFC("Brötchen"): 2, NFC("Käse"): 3}
    assert 9 in open_set(root).images.flatten().tolist()


def test_a_folder_or_table_is_found_by_either_form_of_its_name(root: Path) -> None:
    fill(root / NFD("Größe"), "cat", "dog")
    rows = [f"{path.relative_to(root)},{path.parent.name}" for path in root.rglob("*.png")]
    (root / NFD("Größe.csv")).write_text("\n".join(["path,label", *rows]))
    assert open_set(root / NFC("Größe")).classes == open_set(root / NFC("Größe.csv")).classes == ("cat", "dog")
