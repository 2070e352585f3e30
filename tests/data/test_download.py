from __future__ import annotations

import errno
import hashlib
import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from downloading import CONTENT, MD5, MirrorMaker, get, put_part
from filelock import FileLock

from cifar_lit.data import download
from cifar_lit.data.download import md5_of
from cifar_lit.errors import Failure

pytestmark = pytest.mark.usefixtures("impatient")


def test_a_file_comes_from_the_first_mirror_and_leaves_no_part_behind(mirror: MirrorMaker, target: Path) -> None:
    first, second = mirror(), mirror()
    assert get(target, first, second) == target
    assert target.read_bytes() == CONTENT
    assert second.asked == []
    assert not target.with_name("a.gz.part").exists()


def test_the_source_and_the_rate_are_shown(mirror: MirrorMaker, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = mirror()
    get(target, server)
    shown = capsys.readouterr().err
    assert f"a.gz from {server.url.removeprefix('http://').rstrip('/')}" in shown
    assert "MB/s" in shown


def test_a_file_put_there_by_hand_is_used_without_a_download(mirror: MirrorMaker, target: Path) -> None:
    server = mirror()
    target.parent.mkdir()
    target.write_bytes(CONTENT)
    assert get(target, server) == target
    assert server.asked == []
    assert list(target.parent.iterdir()) == [target]


def test_a_wrong_file_put_there_by_hand_is_named_and_left_alone(mirror: MirrorMaker, target: Path) -> None:
    server = mirror()
    target.parent.mkdir()
    target.write_bytes(b"mine")
    with pytest.raises(Failure) as failure:
        get(target, server)
    text = str(failure.value)
    assert str(target) in text and MD5 in text and hashlib.md5(b"mine").hexdigest() in text and "delete" in text
    assert target.read_bytes() == b"mine"
    assert server.asked == []


def test_a_broken_transfer_goes_on_where_it_stopped(mirror: MirrorMaker, target: Path) -> None:
    server = mirror(cuts=[30_000, 30_000])
    get(target, server)
    assert target.read_bytes() == CONTENT
    assert server.asked == [("a.gz", 0), ("a.gz", 30_000), ("a.gz", 60_000)]


def test_the_next_mirror_goes_on_where_the_last_one_broke_for_good(mirror: MirrorMaker, target: Path) -> None:
    breaking, good = mirror(cuts=[10_000] * download.MAX_ATTEMPTS), mirror()
    get(target, breaking, good)
    assert target.read_bytes() == CONTENT
    assert len(breaking.asked) == download.MAX_ATTEMPTS
    assert good.asked == [("a.gz", 10_000 * download.MAX_ATTEMPTS)]


def test_a_part_of_an_earlier_start_is_taken_up(mirror: MirrorMaker, target: Path) -> None:
    server = mirror()
    put_part(target, CONTENT[:70_000])
    get(target, server)
    assert target.read_bytes() == CONTENT
    assert server.asked == [("a.gz", 70_000)]


def test_a_part_that_was_whole_already_needs_no_server(mirror: MirrorMaker, target: Path) -> None:
    server = mirror()
    put_part(target, CONTENT)
    get(target, server)
    assert target.read_bytes() == CONTENT
    assert server.asked == []


@pytest.mark.parametrize("behaviour", [{"ranges": False}, {"range_shift": 7}], ids=["ignored", "answered from another byte"])
def test_where_a_range_is_not_honoured_the_transfer_starts_anew(
    mirror: MirrorMaker, target: Path, behaviour: dict[str, Any]
) -> None:
    server = mirror(**behaviour)
    put_part(target, CONTENT[:40_000])
    get(target, server)
    assert target.read_bytes() == CONTENT
    assert server.asked[0] == ("a.gz", 40_000)


def test_a_part_longer_than_the_file_is_started_anew(mirror: MirrorMaker, target: Path) -> None:
    server = mirror()
    put_part(target, CONTENT + b"more")
    get(target, server)
    assert target.read_bytes() == CONTENT
    assert server.asked == [("a.gz", len(CONTENT) + 4), ("a.gz", 0)]


def test_a_wrong_beginning_is_fetched_once_anew_from_the_same_mirror(mirror: MirrorMaker, target: Path) -> None:
    server = mirror()
    put_part(target, b"\0" * 50_000)
    get(target, server)
    assert target.read_bytes() == CONTENT
    assert server.asked == [("a.gz", 50_000), ("a.gz", 0)]


def test_a_corrupted_copy_is_dropped_for_the_next_mirror(mirror: MirrorMaker, target: Path) -> None:
    bad, good = mirror(corrupt=True), mirror()
    get(target, bad, good)
    assert target.read_bytes() == CONTENT
    assert len(bad.asked) == 1
    assert good.asked == [("a.gz", 0)]


def test_a_corrupted_copy_that_also_breaks_off_is_fetched_twice_at_most(mirror: MirrorMaker, target: Path) -> None:
    server = mirror(corrupt=True, cuts=[50_000, 100_000, 50_000])
    with pytest.raises(Failure, match="wrong md5"):
        get(target, server)
    assert server.asked == [("a.gz", 0), ("a.gz", 50_000)] * 2
    assert not target.with_name("a.gz.part").exists()


def test_a_log_in_page_does_not_replace_what_has_come(mirror: MirrorMaker, target: Path) -> None:
    page, good = mirror(content_type="text/html; charset=utf-8", ranges=False), mirror()
    put_part(target, CONTENT[:90_000])
    get(target, page, good)
    assert good.asked == [("a.gz", 90_000)]


@pytest.mark.parametrize("as_url", [True, False], ids=["file url", "plain path"])
def test_a_local_copy_is_a_source_like_any_other(tmp_path: Path, target: Path, as_url: bool) -> None:
    copy = tmp_path / "copy of a.gz"
    copy.write_bytes(CONTENT)
    put_part(target, CONTENT[:10])
    get(target, copy.as_uri() if as_url else str(copy))
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, ["disk is full", "100,000 bytes"]), (errno.EACCES, ["Permission denied"])],
    ids=["full disk", "no permission"],
)
def test_a_disk_that_refuses_names_folder_and_need(
    mirror: MirrorMaker, target: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: list[str]
) -> None:
    opened = Path.open

    def refuse(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if "w" in mode and path.suffix == ".part":
            raise OSError(number, "Permission denied" if number == errno.EACCES else "No space left on device")
        return opened(path, mode, *args, **kwargs)

    server = mirror()
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(Failure) as failure:
        get(target, server)
    assert all(word in str(failure.value) for word in [*words, str(target.parent), "--data-dir"])


def test_a_data_folder_that_cannot_be_made_is_named(tmp_path: Path, mirror: MirrorMaker) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(Failure, match=r"file: File exists.*--data-dir"):
        get(tmp_path / "file" / "a.gz", mirror())


def test_two_processes_at_once_download_one_time(mirror: MirrorMaker, target: Path) -> None:
    server = mirror(bytes_per_second=100_000)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=get, args=(target, f"{server.url}a.gz")) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert md5_of(target) == MD5
    assert len(server.asked) == 1


def test_a_wait_for_another_process_is_told(mirror: MirrorMaker, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = mirror()
    target.parent.mkdir()
    with ThreadPoolExecutor() as pool:
        with FileLock(f"{target}.lock"):
            second = pool.submit(get, target, server)
            told = ""
            while "waiting for another process" not in told and not second.done():
                time.sleep(0.01)
                told += capsys.readouterr().err
            assert str(target) in told and server.asked == []
        assert second.result(10) == target
