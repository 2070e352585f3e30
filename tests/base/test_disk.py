"""Files are written atomically."""

import errno
import os
import re
from pathlib import Path

import pytest

from cifar_lit.base.errors import Failure
from cifar_lit.base.files import PART, atomic_write


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def write(path: Path, text: str, previous: Path | None = None) -> None:
    with atomic_write(path, previous) as partial:
        partial.write_text(text)


def test_a_write_keeps_the_previous_file_and_an_interrupted_write_changes_nothing(tmp_path: Path) -> None:
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


def test_a_failed_write_names_its_file_and_other_errors_pass_unchanged(tmp_path: Path) -> None:
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
def test_a_kill_between_the_renames_or_a_file_system_without_hard_links_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: bool
) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    a, b = tmp_path / "a", tmp_path / "b"
    write(a, "1")
    if linked:
        b.hardlink_to(a)  # left by a kill; a rename of one name to the other does nothing
    else:
        monkeypatch.setattr(os, "link", fail)
    write(a, "2", b)
    assert (a.read_text(), b.read_text()) == ("2", "1")
    assert names(tmp_path) == ["a", "b"]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads the names of open files from /proc")
def test_the_file_is_synced_before_the_rename_and_its_folder_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    fsync = os.fsync

    def recording(descriptor: int) -> None:
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, (tmp_path / "a").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recording)
    write(tmp_path / "a", "text")
    (part, renamed), folder = synced
    assert part.endswith(PART) and not renamed
    assert folder == (tmp_path.name, True)
