"""Folders of images are read, split and validated."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from own_images import damage, decodings, open_set, save, values

from cifar_lit.base.errors import Failure, UsageError
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.photos.decode import KINDS
from cifar_lit.data.photos.folder import draw_test
from cifar_lit.data.photos.layout import Tree, scan
from cifar_lit.data.settings import Split


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """Return a folder without train/ and test/, with 10 cats, 5 dogs and 1 emu."""
    for name, count in (("cat", 10), ("dog", 5), ("emu", 1)):
        for number in range(count):
            save(tmp_path / "flat" / name / f"{number}.png", number)
    return tmp_path / "flat"


def drawn(root: Path, test_size: float, seed: int) -> dict[str, Tree]:
    return draw_test(scan(root), [], Split(test_size=test_size, seed=seed))


def test_train_and_test_are_read_and_other_files_ignored(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(root / "train/cat/more/deep/x.PNG", 9)
    for hidden in (".git/x.png", "cat/.trash/x.png", "cat/._0.png", "__MACOSX/x.png", "../.cache/x.png"):
        save(root / "train" / hidden)
    (root / "train/dog/loop").symlink_to(root / "train/dog")
    (root / "train/cat/notes.txt").write_text("x")
    train, test = (open_set(root, part) for part in (True, False))
    assert train.classes == test.classes == ("cat", "dog") and train.images.shape == (6, 8, 8, 3)
    assert values(root) == [0, 1, 2, 9, 3, 4] and train.labels.tolist() == [0, 0, 0, 0, 1, 1]
    assert values(root, train=False) == [5, 6] and test.labels.tolist() == [0, 1]
    err = capsys.readouterr().err
    assert f"{root}: 1 files are not {KINDS} and are ignored: train/cat/notes.txt.\n" in err
    assert f"{root}: 4 hidden or system folders skipped (.cache, .git, .trash and 1 more)\n" in err


def test_without_train_and_test_the_split_depends_on_seed_and_relative_paths_only(flat: Path, tmp_path: Path) -> None:
    parts = drawn(flat, 0.2, 0)
    counts = {name: (len(parts["train"][name]), len(parts["test"][name])) for name in parts["train"]}
    assert counts == {"cat": (8, 2), "dog": (4, 1), "emu": (1, 0)}
    paths = [{file.path for files in part.values() for file in files} for part in parts.values()]
    assert not paths[0] & paths[1] and len(paths[0] | paths[1]) == 16
    assert drawn(flat, 0.2, 1)["test"] != parts["test"]
    assert {name: len(files) for name, files in drawn(flat, 0.9, 0)["train"].items()} == {"cat": 1, "dog": 1, "emu": 1}
    shutil.copytree(flat, tmp_path / "elsewhere")
    os.utime(tmp_path / "elsewhere/cat/0.png", (1, 1))
    for path in (flat, tmp_path / "elsewhere"):  # the split of a seed never changes
        assert [file.path for file in drawn(path, 0.2, 0)["test"]["cat"]] == ["cat/0.png", "cat/1.png"]


def test_images_of_other_formats_are_counted_by_suffix_with_a_remedy(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("1.NEF", "2.nef", "3.jxl", "notes.md"):
        (root / "train/cat" / name).touch()
    scan(root)
    assert " 2 .nef, 1 .jxl: save those that are pictures as .jpg or .png\n" in capsys.readouterr().err
    (root / "train/fox").mkdir()
    (root / "train/fox/photo.jp2").touch()
    (root / "train/fox/photo").touch()
    with pytest.raises(UsageError, match=r"no JPEG, .* for class fox\. 1 without a suffix, 1 \.jp2: save those"):
        scan(root)


def test_each_folder_is_visited_once_despite_multiple_links(root: Path) -> None:
    for name in ("again", "and_again"):
        (root / "train/cat" / name).symlink_to(root / "train/cat")
    (root / "train/cat/itself").symlink_to("itself")
    assert len(scan(root).parts["train"]["cat"]) == 3


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([(20, 28)] * 4, (20, 28)),
        ([(64, 64)] * 4, (64, 64)),
        ([(65, 65)] * 4, (32, 32)),
        ([*[(8, 8)] * 70, (8, 9), (8, 8)], (32, 32)),
    ],
)
def test_a_common_size_of_up_to_64_pixels_is_kept(tmp_path: Path, sizes: list, expected: tuple[int, int]) -> None:
    for number, size in enumerate(sizes):
        save(tmp_path / f"own/{'ab'[number % 2]}/{number:03}.png", size=size)
    assert open_set(tmp_path / "own").images.shape[1:3] == expected


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_val_is_the_validation_set_beside_a_test_set(root: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    save(root / name / "cat/0.png", 50), save(root / name / "dog/0.png", 60)
    damage(save(root / name / "dog/1.png"))
    train, tested = (open_set(root, part, skip_bad=True) for part in (True, False))
    assert values(root, skip_bad=True) == [0, 1, 2, 3, 4, 50, 60] and train.labels.tolist() == [0, 0, 0, 1, 1, 0, 1]
    assert train.val_rows == range(5, 7) and tested.val_rows is None
    assert values(root, train=False, skip_bad=True) == [5, 6] and tested.labels.tolist() == [0, 1]
    data = ImageData("folder", str(root), val_size=0, images={"skip_bad": True})
    assert [part.tolist() for part in data.split] == [[0, 1, 2, 3, 4], [5, 6]]
    assert ": data.val_size 0 is ignored" in capsys.readouterr().err


def test_without_test_images_val_is_the_test_set_and_validation_images_are_drawn_from_train(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "test").rename(root / "val")
    assert values(root) == [0, 1, 2, 3, 4] and values(root, train=False) == [5, 6]
    told = f"{root}: there are no test images, so val is the test set, and train gives the validation images"
    assert told in capsys.readouterr().err
    for size in (2, 0):
        train, val = ImageData("folder", str(root), val_size=size).split
        assert sorted([*train.tolist(), *val.tolist()]) == [0, 1, 2, 3, 4] and len(val) == size
    folds = open_set(root, split=Split(folds=2))
    assert len(folds) == 7  # each image is tested in one fold


def replace_root(root: Path, *images: str) -> None:
    shutil.rmtree(root)
    for image in images:
        save(root / image)


def copy_tables(root: Path) -> None:
    for name, rows in {"a.csv": "1,a\n2,b", "labels.csv": "1,a\n2,b\n3,b", "z.csv": "1,a\n" * 9, "b.json": ""}.items():
        (root / name).write_text(f"path,label\n{rows}")


def archive_in_place(root: Path) -> None:
    shutil.rmtree(root)
    root.write_bytes(b"PK")


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (archive_in_place, "pets is not a table .*, unpack an archive to a folder"),
        (
            lambda root: [shutil.rmtree(root / part / "dog") for part in ("train", "test")],
            r"train has one class only \(cat\)",
        ),
        (
            lambda root: replace_root(root, "cat1.png", "cat2.png"),
            r"2 images lie directly in .*pets \(cat1.png, cat2.png\): move each .* such as .*pets/cat/cat1.png",
        ),
        (
            lambda root: (replace_root(root, "images/cat1.png"), copy_tables(root)),
            r"one class only \(images\), .* \(did you mean --data-dir .*pets/labels.csv\?\)",
        ),
        (
            lambda root: (replace_root(root, "images/cat1.png"), (root / "b.json").touch()),
            r"one class only \(images\), .* \(.*pets/b.json is not a table",
        ),
        (
            lambda root: save(root / "train/a\tb/0.png"),
            r"in .*pets/train, the folder 'a\\tb' has to be renamed: a class name is",
        ),
        (lambda root: replace_root(root, "cat/0.png", "dog/0.png"), "every class below .* has only one image or group"),
    ],
)
def test_an_invalid_folder_is_refused_in_one_line(root: Path, spoil: Callable[[Path], object], text: str) -> None:
    spoil(root)
    with pytest.raises(UsageError, match=text) as refusal:
        open_set(root)
    assert "\n" not in str(refusal.value) and not (root.parent / "cache").exists()


def test_damaged_images_fail_by_name_or_are_skipped_on_request(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(root / "train/cat/1.png")
    (root / "test/dog/gone.png").symlink_to(root / "nowhere.png")
    reasons = r"train/cat/1.png \(cut short\), test/dog/gone.png \(missing"
    text = rf"2 of 8 images .* cannot be read: {reasons}.*--data.skip_bad true"
    for _ in range(2):
        with pytest.raises(Failure, match=text):
            open_set(root)
    assert decodings(capsys) == 8  # decoded once
    assert values(root, skip_bad=True) == [0, 2, 3, 4] and open_set(root, skip_bad=True).labels.tolist() == [0, 0, 1, 1]
    told = capsys.readouterr().err
    assert told.endswith("(missing: there is no such file); they are left out\n") and told.count("\n") == 1


@pytest.mark.parametrize(("dataset", "groups"), [("shapes", "folder"), ("folder", "camera"), ("folder", "")])
def test_groups_need_images_that_have_the_column(root: Path, dataset: str, groups: str) -> None:
    place = {"folder": str(root)}.get(dataset)
    data = ImageData(dataset, place, images={"groups": groups})
    with pytest.raises(UsageError, match=rf"data\.groups: the images of {dataset} have no '{groups}': use a table"):
        _ = data.test_images


def test_a_validation_part_far_from_its_share_is_noted(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ["path,label,camera"]
    for value in range(60):
        path = save(root / f"{value}.png", value)
        rows.append(f"{path.name},{value % 2},{value % 3}")
    (root / "labels.csv").write_text("\n".join(rows))
    data = ImageData("folder", str(root / "labels.csv"), split=Split(group="camera"))
    told = f"{len(data.split[1])} validation images of 40, not 4: images of a group stay together"
    assert told in capsys.readouterr().err
