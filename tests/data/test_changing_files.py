"""Data that change or lie while they are read: files that vanish, are rewritten or are no files, servers that never end."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from downloading import CONTENT, MirrorMaker, get
from own_images import decodings, open_set, save

from cifar_lit.data import archives, cache, download
from cifar_lit.data.archives import idx_intact, unpack
from cifar_lit.data.folder import folder
from cifar_lit.errors import Failure, UsageError


def during_the_decoding(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    """Makes `change` happen once, after the files were listed and before they are decoded."""
    decode_files = cache.decode_files
    waiting = [change]

    def changed(*args: Any, **kwargs: Any) -> Any:
        if waiting:
            waiting.pop()()
        return decode_files(*args, **kwargs)

    monkeypatch.setattr(cache, "decode_files", changed)


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


def test_a_file_that_is_rewritten_while_others_are_decoded_is_read_again_by_the_next_start(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    during_the_decoding(monkeypatch, lambda: save(root / "train/cat/1.png", 77))
    open_set(root)
    decodings(capsys)
    assert open_set(root)[:, 0, 0, 0].tolist() == [0, 77, 2, 3, 4]
    assert decodings(capsys) == 1


def test_a_file_that_is_half_written_is_named_and_taken_in_when_it_is_whole(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = root / "train/cat/1.png"
    whole = victim.read_bytes()
    during_the_decoding(monkeypatch, lambda: victim.write_bytes(whole[:-20]))
    with pytest.raises(Failure, match=r"train/cat/1\.png \(.*cut short"):
        open_set(root)
    victim.write_bytes(whole)
    assert open_set(root)[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]


def test_a_file_that_grows_to_another_size_while_others_are_decoded_changes_the_size_of_all(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    during_the_decoding(monkeypatch, lambda: save(root / "train/dog/1.png", 4, (9, 9)))
    assert open_set(root).shape[1:3] == (32, 32)


@pytest.mark.parametrize("special", ["pipe", "device"])
def test_what_is_no_file_is_ignored_and_never_waited_for(root: Path, special: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = root / "train/cat/5.png"
    if special == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    assert len(open_set(root)) == 5
    assert "train/cat/5.png" in capsys.readouterr().err


def test_a_class_of_nothing_but_pipes_is_empty(tmp_path: Path) -> None:
    save(tmp_path / "pets/cat/0.png"), save(tmp_path / "pets/cat/1.png")
    (tmp_path / "pets/dog").mkdir()
    os.mkfifo(tmp_path / "pets/dog/0.png")
    with pytest.raises(UsageError, match="for class dog"):
        folder(tmp_path / "pets", True)


@pytest.mark.usefixtures("impatient")
def test_a_source_that_claims_or_gives_too_much_is_left(
    mirror: MirrorMaker, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless, good = mirror(), mirror()
    endless.files["a.gz"] = CONTENT * 2
    monkeypatch.setattr(download, "MAX_DOWNLOAD", len(CONTENT))
    get(target, endless, good)
    assert target.read_bytes() == CONTENT
    monkeypatch.setattr(download, "_open", lambda url, start: (io.BytesIO(CONTENT * 2), 0, 0))  # no length is told
    target.unlink()
    with pytest.raises(Failure, match="gives more than"):
        get(target, endless)
    assert target.with_name("a.gz.part").stat().st_size == 0


@pytest.mark.parametrize("special", ["pipe", "device", "hole"])
def test_what_is_no_archive_in_its_place_is_told_and_not_read(target: Path, special: str) -> None:
    target.parent.mkdir()
    if special == "pipe":
        os.mkfifo(target)
    elif special == "device":
        target.symlink_to("/dev/zero")
    else:
        target.touch()
        os.truncate(target, 4 << 30)
    with pytest.raises(Failure, match="is another file: wanted is a file of at most 256 MiB"):
        get(target)


@pytest.mark.parametrize(
    ("name", "kind", "link"),
    [
        ("../ran", tarfile.REGTYPE, ""),
        ("/tmp/cifar-lit-ran", tarfile.REGTYPE, ""),
        ("data/link", tarfile.SYMTYPE, "/etc"),
        ("data/link", tarfile.LNKTYPE, "../../etc/passwd"),
        ("data/null", tarfile.CHRTYPE, ""),
        ("data/pipe", tarfile.FIFOTYPE, ""),
    ],
)
def test_unpacking_stays_in_its_folder_whatever_the_archive_says(tmp_path: Path, name: str, kind: bytes, link: str) -> None:
    """An archive's md5 is checked before; this is what would happen if a wrong one had the right md5."""
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    with tarfile.open(tmp_path / "data.tar", "w") as tar:
        tar.addfile(member)
    room = tmp_path / "room"
    room.mkdir()
    before = set(tmp_path.rglob("*"))
    try:
        unpack(tmp_path / "data.tar", room / "data")
    except Failure as refusal:
        assert "was not unpacked" in str(refusal)
    except FileNotFoundError:  # it fell into the room without the folder that is wanted
        pass
    assert {path for path in set(tmp_path.rglob("*")) - before if not path.is_relative_to(room)} == set()
    assert not Path("/tmp/cifar-lit-ran").exists()
    assert not [path for path in room.rglob("*") if path.is_symlink() or not (path.is_file() or path.is_dir())]


def test_an_archive_that_unpacks_to_too_much_is_left_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_UNPACKED", 1000)
    with tarfile.open(tmp_path / "data.tar", "w") as tar:
        member = tarfile.TarInfo("data/a")
        member.size = 1001
        tar.addfile(member, io.BytesIO(bytes(1001)))
    with pytest.raises(Failure, match="it claims 1,001 bytes"):
        unpack(tmp_path / "data.tar", tmp_path / "data")
    assert [path.name for path in tmp_path.iterdir()] == ["data.tar"]


def test_an_idx_file_that_claims_more_than_it_holds_is_not_read(tmp_path: Path) -> None:
    plain = tmp_path / "images"
    plain.write_bytes(bytes([0, 0, 8, 3]) + 3 * (2**31).to_bytes(4, "big"))
    assert not idx_intact(tmp_path / "images.gz")
    os.truncate(plain, 4 << 30)
    assert not idx_intact(tmp_path / "images.gz")
    plain.write_bytes(bytes([0, 0, 14, 1, 0, 0, 0, 8]) + bytes(8))  # one float64, told as eight bytes
    assert not idx_intact(tmp_path / "images.gz")
