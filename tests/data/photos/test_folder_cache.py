"""The cache of decoded images is reused, updated, repaired and shared, or skipped."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from own_images import damage, decodings, open_set, save, save_photo, values

from cifar_lit.base.errors import Failure
from cifar_lit.data.photos import cache, decode
from cifar_lit.data.settings import Loading


def slot(root: Path) -> Path:
    return next((root.parent / "cache").iterdir())


def during_the_decoding(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    """Makes `change` happen once, after the files were listed and before they are decoded."""
    real_decode, changes = decode.decode, [change]

    def decode_changed(*args: Any, **kwargs: Any) -> Any:
        if changes:
            changes.pop()()
        return real_decode(*args, **kwargs)

    monkeypatch.setattr(decode, "decode", decode_changed)
    monkeypatch.setattr(decode, "core_count", lambda: 1)


def test_only_changed_and_added_files_are_decoded_again(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(
        root / "train/cat/0.png", os.fsdecode(os.fsencode(root / "train/dog") + b"/\xff.png")
    )  # not valid UTF-8
    assert values(root) == [0, 1, 2, 3, 4, 0] and decodings(capsys) == 8
    open_set(root), open_set(root, train=False)
    assert capsys.readouterr().err == ""
    (slot(root) / "images-dead.u8").write_bytes(b"left by an interrupted decoding")
    save(root / "train/cat/1.png", 77)
    assert values(root) == [0, 77, 2, 3, 4, 0] and decodings(capsys) == 1
    save(root / "train/dog/9.png", 88)
    assert values(root) == [0, 77, 2, 3, 4, 88, 0] and decodings(capsys) == 1
    (root / "train/cat/0.png").unlink()
    assert values(root) == [77, 2, 3, 4, 88, 0] and decodings(capsys) == 0
    damage(root / "train/cat/2.png")
    assert values(root, skip_bad=True) == [77, 3, 4, 88, 0]
    save(root / "train/cat/2.png", 2)
    assert values(root) == [77, 2, 3, 4, 88, 0]
    assert sorted(path.suffix for path in slot(root).iterdir()) == ["", ".json", ".u8"]
    save(root / "train/cat/1.png", 77, size=(8, 9))
    assert open_set(root).images.shape[1:3] == (32, 32)


def test_swapped_files_of_equal_size_and_time_are_decoded_again(root: Path) -> None:
    cat, dog = (save(root / f"train/{name}/7.bmp", value) for name, value in (("cat", 70), ("dog", 80)))
    for path in (cat, dog):
        os.utime(path, (1, 1))
    assert values(root) == [0, 1, 2, 70, 3, 4, 80]
    spare = cat.rename(root / "spare")
    dog.rename(cat), spare.rename(dog)
    assert values(root) == [0, 1, 2, 80, 3, 4, 70]
    save(cat, 90)
    os.utime(cat, (1, 1))
    assert values(root) == [0, 1, 2, 90, 3, 4, 70]


def test_each_way_of_resizing_and_each_number_of_channels_has_its_own_images(root: Path) -> None:
    save(root / "train/cat/7.png", 7, size=(8, 16))
    shown = [open_set(root, image_size=8, resize=resize).images for resize in ("crop", "letterbox")]
    assert not torch.equal(*shown) and open_set(root, image_size=8, channels=1).images.shape == (6, 8, 8, 1)


@pytest.mark.parametrize(
    "harm",
    [
        lambda index, data: os.truncate(data, data.stat().st_size - 1),
        lambda index, data: data.unlink(),
        lambda index, data: os.truncate(index, index.stat().st_size // 2),
        lambda index, data: index.write_text("[1, 2]"),
    ],
)
def test_a_damaged_cache_is_rebuilt(root: Path, harm: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    open_set(root), decodings(capsys)
    harm(slot(root) / "index.json", next(slot(root).glob("*.u8")))
    assert values(root) == [0, 1, 2, 3, 4] and decodings(capsys) == 7
    assert sorted(path.suffix for path in slot(root).iterdir()) == ["", ".json", ".u8"]


def test_a_full_disk_or_ctrl_c_leaves_the_old_cache_unchanged(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    open_set(root)
    before = {path: path.read_bytes() for path in slot(root).iterdir()}
    save(root / "train/cat/1.png", 77)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(Failure, match=r"not be written to .*cache: No space left on device.*\$CIFAR_LIT_CACHE"):
            open_set(root)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(cache, "decode_all", interrupted)
        open_set(root)
    assert {path: path.read_bytes() for path in slot(root).iterdir()} == before
    decodings(capsys)
    assert values(root)[1] == 77 and decodings(capsys) == 1


def test_an_image_that_became_readable_is_checked_for_duplicates(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, away = root / "train/cat/8.png", root / "train/dog/8.png", root.parent / "away.png"
    for path in (first, second):
        save_photo(path, 5)
    during_the_decoding(monkeypatch, lambda: second.rename(away))
    assert open_set(root, image_size=32, skip_bad=True).groups is None
    away.rename(second)
    groups = open_set(root, image_size=32).groups
    assert groups is not None and len(groups.unique()) == len(groups) - 1


def test_an_unwritable_cache_is_named(root: Path) -> None:
    blocked = root.parent / "file"
    blocked.write_text("not a folder")
    with pytest.raises(Failure, match=r"not be written to .*file/cache: Not a directory; set \$CIFAR_LIT_CACHE"):
        open_set(root, cache_dir=str(blocked / "cache"))


def test_the_environment_sets_the_cache_folder(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("CIFAR_LIT_CACHE", raising=False)
    assert Loading().cache_path == tmp_path / "xdg/cifar-lit"
    monkeypatch.setenv("CIFAR_LIT_CACHE", str(tmp_path / "named"))
    open_set(root)
    assert list((tmp_path / "named").glob("pets-*/index.json"))


def test_two_processes_may_open_a_folder_at_once(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with get_context("spawn").Pool(2) as pool:
        assert pool.map(values, [root, root]) == [[0, 1, 2, 3, 4]] * 2
    assert capfd.readouterr().err.count("decoding images: 7 images") == 1
