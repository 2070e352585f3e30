import errno
import os
import re
from pathlib import Path

import pytest

from cifar_lit.errors import Failure
from cifar_lit.files import PART, atomic_write, read_text


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def write(path: Path, text: str, previous: Path | None = None) -> None:
    with atomic_write(path, previous) as partial:
        partial.write_text(text)


def test_a_file_has_the_mode_that_the_umask_gives_whatever_a_library_sets(tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        with atomic_write(tmp_path / "a") as partial:
            partial.unlink()
            partial.touch(0o600)
    finally:
        os.umask(mask)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_the_file_before_is_kept_under_another_name_and_stays_when_a_write_breaks_off(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    write(a, "1", b)
    assert names(tmp_path) == ["a"]
    for number in (2, 3):
        write(a, str(number), b)
        assert (a.read_text(), b.read_text()) == (str(number), str(number - 1))
    with pytest.raises(KeyboardInterrupt), atomic_write(a, b) as partial:
        partial.write_text("4, not yet compl")
        assert re.fullmatch(r"a\.[0-9a-f]{8}" + re.escape(PART), partial.name) and a.read_text() == "3"
        raise KeyboardInterrupt
    assert (a.read_text(), b.read_text()) == ("3", "2")
    assert names(tmp_path) == ["a", "b"]


def test_a_failed_write_names_the_file_whatever_the_library_raised_and_other_errors_stay_as_they_are(
    tmp_path: Path,
) -> None:
    def fail(error: Exception) -> None:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            raise error  # noqa: B904 (torch sets no cause either)

    with pytest.raises(OSError, match="No space left on device") as full, atomic_write(tmp_path / "a"):
        fail(RuntimeError("unexpected pos 64 vs 0"))
    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, str(tmp_path / "a"))
    with pytest.raises(Failure, match="traced"), atomic_write(tmp_path / "a"):
        fail(Failure("the net cannot be traced"))
    with pytest.raises(FileNotFoundError) as missing, atomic_write(tmp_path / "a"):
        (tmp_path / "input").read_text()
    assert missing.value.filename == str(tmp_path / "input")
    assert names(tmp_path) == []


@pytest.mark.parametrize("linked", [True, False])
def test_a_kill_between_the_renames_and_a_file_system_without_second_names_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: bool
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    a, b = tmp_path / "a", tmp_path / "b"
    write(a, "1")
    if linked:
        b.hardlink_to(a)  # as a kill leaves it: one file of two names, which a rename leaves alone
    else:
        monkeypatch.setattr(os, "link", refused)
    write(a, "2", b)
    assert (a.read_text(), b.read_text()) == ("2", "1")
    assert names(tmp_path) == ["a", "b"]


def test_the_file_and_its_folder_are_synced_before_and_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, (tmp_path / "a").exists()))
        sync(descriptor)

    if not Path("/proc/self/fd").exists():
        pytest.skip("the system does not tell the names of open files")
    monkeypatch.setattr(os, "fsync", noted)
    write(tmp_path / "a", "text")
    (part, before), folder = synced
    assert part.endswith(PART) and not before
    assert folder == (tmp_path.name, True)


def test_neither_a_link_in_its_place_nor_one_in_that_of_the_part_or_the_previous_is_written_through(
    tmp_path: Path,
) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("as it was")
    a, b = tmp_path / "a", tmp_path / "b"
    links = (a, b, tmp_path / f"a{PART}", tmp_path / f"b{PART}")
    for link in links:
        link.symlink_to(theirs)
    write(a, "1", b)
    write(a, "2", b)
    assert (a.read_text(), b.read_text(), theirs.read_text()) == ("2", "1", "as it was")
    assert not a.is_symlink() and not b.is_symlink()


def test_only_files_of_a_bounded_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 1 << 40)
    (tmp_path / "empty").touch()  # files of the kernel that block, such as /proc/kmsg, have size 0 too
    reasons = {
        "pipe": "a pipe or a device",
        "device": "a pipe or a device",
        "large": "larger than 8 MiB",
        ".": "a folder",
    }
    for name, reason in {**reasons, "empty": "is empty"}.items():
        with pytest.raises(OSError, match=reason):
            read_text(tmp_path / name)
    (tmp_path / "text").write_text("…")
    assert read_text(tmp_path / "text") == "…"
