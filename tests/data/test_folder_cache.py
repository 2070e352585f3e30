"""The cache of decoded images: when it is used, redone, shared and done without."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from own_images import damage, decodings, open_set, save

from cifar_lit.data import cache
from cifar_lit.data.cache import default_cache_dir
from cifar_lit.data.folder import folder
from cifar_lit.errors import Failure


def slot(root: Path) -> Path:
    return next((root.parent / "cache").iterdir())


def during_the_decoding(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    """Makes `change` happen once, after the files were listed and before they are decoded."""
    decode_files = cache.decode_files
    changes = [change]

    def decode_changed(*args: Any, **kwargs: Any) -> Any:
        if changes:
            changes.pop()()
        return decode_files(*args, **kwargs)

    monkeypatch.setattr(cache, "decode_files", decode_changed)


def test_an_image_that_became_readable_without_changing_is_taken_in(root: Path) -> None:
    hidden, link = save(root.parent / "away.png", 99), root / "train/cat/9.png"
    link.symlink_to(hidden)
    hidden.rename(root.parent / "moved.png")
    assert len(open_set(root, skip_bad=True)) == 5
    (root.parent / "moved.png").rename(hidden)
    assert open_set(root)[:, 0, 0, 0].tolist() == [0, 1, 2, 99, 3, 4]


def test_changed_added_and_removed_files_are_noticed_and_only_they_are_decoded(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_set(root)
    assert decodings(capsys) == 7
    open_set(root), open_set(root, train=False)
    assert capsys.readouterr().err == ""
    (slot(root) / "images-dead.u8").write_bytes(b"left by an interrupted decoding")
    save(root / "train/cat/1.png", 77)
    assert open_set(root)[:, 0, 0, 0].tolist() == [0, 77, 2, 3, 4] and decodings(capsys) == 1
    save(root / "train/dog/9.png", 88)
    assert open_set(root)[:, 0, 0, 0].tolist() == [0, 77, 2, 3, 4, 88] and decodings(capsys) == 1
    (root / "train/cat/0.png").unlink()
    assert open_set(root)[:, 0, 0, 0].tolist() == [77, 2, 3, 4, 88] and decodings(capsys) == 0
    damage(root / "train/cat/2.png")
    assert open_set(root, skip_bad=True)[:, 0, 0, 0].tolist() == [77, 3, 4, 88]
    save(root / "train/cat/2.png", 2)
    assert open_set(root)[:, 0, 0, 0].tolist() == [77, 2, 3, 4, 88]
    assert sorted(path.suffix for path in slot(root).iterdir()) == ["", ".json", ".u8"]
    save(root / "train/cat/1.png", 77, size=(8, 9))
    assert open_set(root).shape[1:3] == (32, 32)


def edited(index: Path, **changes: Any) -> None:
    index.write_text(json.dumps(json.loads(index.read_text()) | changes))


@pytest.mark.parametrize(
    "harm",
    [
        lambda index, data: os.truncate(data, data.stat().st_size - 1),
        lambda index, data: data.unlink(),
        lambda index, data: os.truncate(index, index.stat().st_size // 2),
        lambda index, data: index.unlink(),
        lambda index, data: index.write_text("[1, 2]"),
        lambda index, data: edited(index, format=0),
        lambda index, data: edited(index, files=json.loads(index.read_text())["files"][1:]),
    ],
    ids=["cut data", "no data", "cut index", "no index", "foreign index", "other format", "row count"],
)
def test_a_cache_that_is_not_whole_is_made_again(
    root: Path, harm: Callable[[Path, Path], object], capsys: pytest.CaptureFixture[str]
) -> None:
    before = open_set(root).clone()
    decodings(capsys)
    harm(slot(root) / "index.json", next(slot(root).glob("*.u8")))
    assert torch.equal(open_set(root), before) and decodings(capsys) == 7
    assert sorted(path.suffix for path in slot(root).iterdir()) == ["", ".json", ".u8"]


def test_a_full_disk_fails_in_one_line_and_leaves_the_old_cache_and_no_new_file(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    open_set(root)
    before = {path: path.read_bytes() for path in slot(root).iterdir()}
    changed = save(root / "train/cat/1.png", 77)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(Failure, match=r"could not be written to .*cache: No space left on device; .*\$CIFAR_LIT_CACHE"):
            open_set(root)
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage(root)
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=7 * 8 * 8 * 3 - 1))
        with pytest.raises(Failure, match="No space left on device"):
            open_set(root)
    assert {path: path.read_bytes() for path in slot(root).iterdir()} == before
    decodings(capsys)
    assert changed.exists() and open_set(root)[1, 0, 0, 0] == 77 and decodings(capsys) == 1


def test_ctrl_c_while_decoding_leaves_no_half_cache(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "decode_chunks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_set(root)
    assert [path.name for path in slot(root).iterdir()] == ["lock"]


def test_a_file_that_is_deleted_while_others_are_decoded_is_named_and_can_be_left_out(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = root / "train/cat/1.png"
    during_the_decoding(monkeypatch, victim.unlink)
    with pytest.raises(Failure, match=r"1 of 7 images .* are damaged: train/cat/1\.png \(No such file or directory\)"):
        open_set(root)
    assert open_set(root)[:, 0, 0, 0].tolist() == [0, 2, 3, 4]  # the next start lists what is there
    save(victim, 1)
    during_the_decoding(monkeypatch, victim.unlink)
    assert open_set(root, skip_bad=True)[:, 0, 0, 0].tolist() == [0, 2, 3, 4]


def test_a_file_that_is_rewritten_while_others_are_decoded_is_read_again_and_may_change_the_size_of_all(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    during_the_decoding(monkeypatch, lambda: save(root / "train/cat/1.png", 77))
    open_set(root)
    decodings(capsys)
    assert open_set(root)[:, 0, 0, 0].tolist() == [0, 77, 2, 3, 4] and decodings(capsys) == 1
    save(root / "train/cat/0.png", 3)
    during_the_decoding(monkeypatch, lambda: save(root / "train/cat/0.png", 4, (9, 9)))
    assert open_set(root).shape[1:3] == (32, 32)


def test_a_cache_folder_that_cannot_be_written_is_told_and_done_without(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocked = root.parent / "file"
    blocked.write_text("not a folder")
    data = folder(root, True, cache_dir=blocked / "cache")
    assert data.images[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert f"nothing is cached: {blocked / 'cache'}: Not a directory; $CIFAR_LIT_CACHE" in capsys.readouterr().err


def test_a_cache_that_may_only_be_read_is_used(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    open_set(root)
    decodings(capsys)

    def refused(self: FileLock, timeout: float | None = None) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(FileLock, "acquire", refused)
    assert open_set(root)[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert capsys.readouterr().err == ""


def test_the_cache_lies_where_the_environment_says_and_never_in_the_root(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(root.rglob("*"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("CIFAR_LIT_CACHE", raising=False)
    assert default_cache_dir() == tmp_path / "xdg/cifar-lit"
    monkeypatch.setenv("CIFAR_LIT_CACHE", str(tmp_path / "named"))
    folder(root, True)
    assert list((tmp_path / "named").glob("pets-*/index.json")) and sorted(root.rglob("*")) == before


def test_writing_to_the_images_changes_neither_the_cache_nor_other_openings(root: Path) -> None:
    first, second = open_set(root), open_set(root)
    first.fill_(200)
    assert second[:, 0, 0, 0].tolist() == open_set(root)[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not refuse large private mappings, or have no sparse files")
def test_a_cache_larger_than_memory_opens(tmp_path: Path) -> None:
    rows = (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 3072 + 1) * 4
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(rows * 3072)
    images = torch.from_numpy(cache.map_images(tmp_path / "sparse", (rows, 32, 32, 3)))
    images[-1] = 7
    assert images[-1].float().mean() == 7 and images[0].sum() == 0


def test_those_that_open_at_once_decode_once(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    during_the_decoding(monkeypatch, lambda: time.sleep(0.2))  # long enough for the others to come to the lock
    with ThreadPoolExecutor(3) as pool:
        sizes = list(pool.map(lambda _: len(open_set(root)), range(3)))
    assert sizes == [5] * 3 and decodings(capsys) == 7


def test_a_large_set_is_decoded_by_several_processes_to_the_same_images(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(150):
        save(root / f"train/cat/more{number}.png", number)
    damage(root / "train/cat/more70.png")
    alone = open_set(root, skip_bad=True).clone()
    monkeypatch.setattr(cache, "POOL_FROM_FILES", 1)
    together = folder(root, True, skip_bad=True, cache_dir=root.parent / "other").images
    assert torch.equal(alone, together) and len(alone) == 154


def test_names_that_are_no_unicode_survive_the_cache(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = os.fsdecode(os.fsencode(root / "train/cat") + b"/\xff.png")
    shutil.copy(root / "train/cat/0.png", odd)
    assert len(open_set(root)) == 6
    decodings(capsys)
    assert len(open_set(root)) == 6 and decodings(capsys) == 0
