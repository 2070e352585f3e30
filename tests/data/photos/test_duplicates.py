"""Near-duplicates are found, and no random split separates them."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from own_images import decodings, open_set, photo, save_photo
from PIL import Image, ImageEnhance

from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.photos import cache
from cifar_lit.data.photos.decode import Preparation, pixels_of
from cifar_lit.data.photos.duplicates import near_duplicates
from cifar_lit.data.settings import Split


def stack(pictures: list[Image.Image], side: int = 32, channels: int = 3) -> np.ndarray:
    return np.stack([pixels_of(picture, Preparation((side, side), channels)) for picture in pictures])


def as_jpeg(picture: Image.Image) -> Image.Image:
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=40)
    return Image.open(file)


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "copied": Image.Image.copy,
    "scaled": lambda picture: picture.resize((40, 40), Image.Resampling.BILINEAR),
    "encoded again": as_jpeg,
    "cropped by 3 %": lambda picture: picture.crop((2, 1, 95, 95)),
    "brighter": lambda picture: ImageEnhance.Brightness(picture).enhance(1.2),
    "less contrast": lambda picture: ImageEnhance.Contrast(picture).enhance(0.8),
    "warmer": lambda picture: Image.fromarray((np.asarray(picture) * 0.6 + [100, 40, 0]).astype(np.uint8)),
    "all changes": lambda picture: as_jpeg(
        ImageEnhance.Brightness(picture.crop((1, 1, 95, 94)).resize((60, 60))).enhance(0.9)
    ),
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_image_is_a_near_duplicate_of_its_original_only(change: str, channels: int) -> None:
    pictures = [photo(seed) for seed in range(150)]
    images = stack([*pictures, *[CHANGES[change](picture) for picture in pictures[:40]]], channels=channels)
    assert near_duplicates(images) == [[row, 150 + row] for row in range(40)]


def test_only_identical_images_of_a_large_group_of_similar_ones_are_duplicates() -> None:
    similar = np.repeat(stack([photo(0)]), 14, 0)
    similar[:, 0, 0, 0] = range(14)
    images = np.concatenate([stack([photo(seed) for seed in range(1, 100)]), similar])
    assert near_duplicates(images[:-5]) == [[*range(99, 108)]]
    assert near_duplicates(images) == []
    assert near_duplicates(np.concatenate([images, images[-1:]])) == [[112, 113]]


def test_copies_in_two_classes_are_counted_however_many(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(12):
        save_photo(root / f"train/{'cat' if number % 2 else 'dog'}/copy{number}.png", 3)
    open_set(root, image_size=32)
    err = capsys.readouterr().err
    assert f"classes share 6 images below {root}, such as train/dog/copy0.png and" in err
    assert 'remove the wrong one; with --data.separator "|", equal files in class folders are one image' in err


def test_equal_files_in_two_classes_are_one_image_with_both_labels_if_they_may_be_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(8):
        for name in ("cat", "dog", "owl")[number % 3 :][:2]:
            save_photo(tmp_path / f"train/{name}/{number}.bmp", number)  # all of the same size
    for name in ("cat", "dog"):
        save_photo(tmp_path / f"test/{name}/0.bmp", 0)  # also in train, which stays apart
    for name in ("cat", "dog"):
        (tmp_path / f"train/{name}/z.png").symlink_to("nowhere")
    images = open_set(tmp_path, image_size=32, separator="|", skip_bad=True)
    assert [images.label_text(row) for row in range(8)] == ["cat|dog"] * 3 + ["dog|owl"] * 3 + ["owl"] * 2
    assert [Path(name).stem for name in images.names] == [*"03614725"]
    err = capsys.readouterr().err
    assert "18 files are 11 images with one or several labels" in err and "classes share" not in err
    assert open_set(tmp_path, train=False, image_size=32, separator="|", skip_bad=True).labels.tolist() == [[1, 1, 0]]


def test_the_same_photo_in_other_colours_is_no_near_duplicate() -> None:
    images = stack([photo(seed) for seed in range(20)])
    assert near_duplicates(np.concatenate([images, images[..., ::-1]])) == []


# ---- in a data set

KIND = "near-duplicates (the same except for scaling, encoding, brightness or a central crop by up to 3 %)"


@pytest.fixture
def twins(tmp_path: Path) -> Path:
    """Return two classes of 20 images. Three images of each class exist as PNG, as JPEG and in a smaller size."""
    for number in range(28):
        path = tmp_path / f"twins/{'ab'[number % 2]}/{number:02}.png"
        save_photo(path, number)
        if number < 6:
            photo(number).save(path.with_suffix(".jpg"), quality=60)
            photo(number, 50).save(path.with_name(f"{number:02}-small.png"))
    return tmp_path / "twins"


def motifs(images: torch.Tensor) -> set[int]:
    """Return the numbers of the photos (0 to 27) among `images`."""
    photos = torch.from_numpy(stack([photo(number) for number in range(28)])).flatten(1).float()
    distances = torch.cdist(images.flatten(1).float(), photos)
    assert float(distances.min(1).values.max()) < 600
    return set(distances.argmin(1).tolist())


def test_a_stratified_split_keeps_near_duplicates_together(twins: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(4):
        data = ImageData("folder", str(twins), split=Split(test_size=0.3, seed=seed), val_size=0.25)
        images, (train, val) = data.train_images, data.split
        parts = images.images[train], images.images[val], data.test_images.images
        assert sum(map(len, parts)) == 40 and sum(len(motifs(part)) for part in parts) == 28
        for labels, count in ((data.test_images.labels, 6), (images.labels[val], 3.5)):
            assert (torch.bincount(labels, minlength=2) - count).abs().max() <= 1.5
    lines = [line for line in capsys.readouterr().err.splitlines() if "near-duplicates" in line]
    assert lines == [f"18 of 40 images below {twins} are {KIND} of each other: they are kept on one side of a split"]


def test_near_duplicates_are_found_once_and_cached(
    twins: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = [open_set(twins, part).images.clone() for part in (True, False)]
    assert decodings(capsys) == 40
    monkeypatch.setattr(cache, "near_duplicates", lambda images: pytest.fail("searched again"))
    for seed in (1, 0):
        sets = [open_set(twins, part, split=Split(seed=seed)) for part in (True, False)]
        assert sum(map(len, sets)) == 40
    assert all(torch.equal(part.images, images) for part, images in zip(sets, first, strict=True))
    assert decodings(capsys) == 0


def test_near_duplicates_across_a_given_split_are_only_reported(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("train/cat/a.png", "train/dog/b.png", "test/cat/c.png", "test/dog/d.png"):
        save_photo(root / name, "abcd".index(name[-5]))
    photo(0).save(root / "test/dog/again.jpg", quality=60)
    photo(2, 50).save(root / "test/cat/twice.png")
    save_photo(root / "val/cat/val.png", 1)
    train, test = (open_set(root, part, image_size=32) for part in (True, False))
    assert len(test) == 6 and train.groups.tolist() == [*range(7), 6]
    lines = [line for line in capsys.readouterr().err.splitlines() if "near-duplicates" in line]
    example = "such as test/dog/again.jpg of train/cat/a.png: scores will be too high"
    assert lines == [f"2 held-out images below {root} are {KIND} of training images, {example}"]
