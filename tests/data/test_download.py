"""`fetch`: mirrors in turn, broken transfers resumed, files checked, one process at a time."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from local_mirrors import CONTENT, MD5, MirrorMaker, get, put_part

from cifar_lit.data import download
from cifar_lit.errors import Failure

pytestmark = pytest.mark.usefixtures("impatient")


def test_a_file_comes_from_the_first_mirror_with_source_and_rate_shown(
    mirror: MirrorMaker, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = mirror(), mirror()
    assert get(target, first, second) == target
    assert target.read_bytes() == CONTENT and second.requests == []
    assert not target.with_name("a.gz.part").exists()
    line = capsys.readouterr().err
    assert f"a.gz from {first.url.removeprefix('http://').rstrip('/')}" in line and "MB/s" in line


@pytest.mark.parametrize("content", [CONTENT, b"mine"], ids=["right", "wrong"])
def test_a_file_put_there_by_hand_is_used_or_named_and_left_alone(mirror: MirrorMaker, target: Path, content: bytes) -> None:
    server = mirror()
    target.parent.mkdir()
    target.write_bytes(content)
    if content == CONTENT:
        assert get(target, server) == target
    else:
        with pytest.raises(Failure) as failure:
            get(target, server)
        assert all(word in str(failure.value) for word in (str(target), MD5, hashlib.md5(content).hexdigest(), "delete"))
    assert target.read_bytes() == content and server.requests == [] and list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("special", ["pipe", "device", "hole"])
def test_what_is_no_archive_in_its_place_is_refused_and_not_read(target: Path, special: str) -> None:
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


# ---- resuming


@pytest.mark.parametrize(
    ("behaviour", "part", "requests"),
    [
        ({"cuts": [30_000, 30_000]}, None, [0, 30_000, 60_000]),
        ({}, CONTENT[:70_000], [70_000]),
        ({}, CONTENT, []),  # whole already: no server is needed
        ({}, CONTENT + b"more", [len(CONTENT) + 4, 0]),
        ({}, b"\0" * 50_000, [50_000, 0]),  # a wrong beginning
        ({"ranges": False}, CONTENT[:40_000], [40_000]),
        ({"range_shift": 7}, CONTENT[:40_000], [40_000, 0]),
    ],
    ids=["broken", "part", "whole part", "long part", "wrong part", "range ignored", "answered from another byte"],
)
def test_a_transfer_goes_on_where_it_stopped_or_starts_anew(
    mirror: MirrorMaker, target: Path, behaviour: dict[str, Any], part: bytes | None, requests: list[int]
) -> None:
    server = mirror(**behaviour)
    if part is not None:
        put_part(target, part)
    get(target, server)
    assert target.read_bytes() == CONTENT
    assert [start for _, start in server.requests] == requests


@pytest.mark.parametrize(
    ("behaviour", "part", "attempts", "start"),
    [
        ({"cuts": [10_000] * download.MAX_ATTEMPTS}, b"", download.MAX_ATTEMPTS, 10_000 * download.MAX_ATTEMPTS),
        ({"corrupt": True}, b"", 1, 0),
        ({"content_type": "text/html; charset=utf-8", "ranges": False}, CONTENT[:90_000], 1, 90_000),  # a log-in page
        ({"status": 404}, b"", 1, 0),
        ({"stall_after": 20_000}, b"", 1, 20_000),
    ],
    ids=["breaks for good", "corrupt", "log-in page", "missing", "stalling"],
)
def test_the_next_mirror_goes_on_from_what_is_right(
    mirror: MirrorMaker, target: Path, refusing_url: str, behaviour: dict[str, Any], part: bytes, attempts: int, start: int
) -> None:
    bad, good = mirror(**behaviour), mirror()
    if part:
        put_part(target, part)
    get(target, refusing_url, bad, good)
    assert target.read_bytes() == CONTENT
    assert len(bad.requests) == attempts and good.requests == [("a.gz", start)]


def test_a_corrupted_copy_that_also_breaks_off_is_fetched_twice_at_most(mirror: MirrorMaker, target: Path) -> None:
    server = mirror(corrupt=True, cuts=[50_000, 100_000, 50_000])
    with pytest.raises(Failure, match="wrong md5"):
        get(target, server)
    assert server.requests == [("a.gz", 0), ("a.gz", 50_000)] * 2
    assert not target.with_name("a.gz.part").exists()


@pytest.mark.parametrize("as_url", [True, False], ids=["file url", "plain path"])
def test_a_local_copy_is_a_source_like_any_other(tmp_path: Path, target: Path, as_url: bool) -> None:
    copy = tmp_path / "copy of a.gz"
    copy.write_bytes(CONTENT)
    put_part(target, CONTENT[:10])
    get(target, copy.as_uri() if as_url else str(copy))
    assert target.read_bytes() == CONTENT


# ---- failures


def test_when_all_fail_each_source_has_its_reason_and_the_way_out_is_named(
    mirror: MirrorMaker, target: Path, refusing_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_names(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest, **kw: (no_names if host == "mirror.invalid" else resolve)(host, *rest, **kw)
    )
    monkeypatch.setattr(download, "MAX_ATTEMPTS", 1)
    cut, missing, silent = mirror(cuts=[35_900]), mirror(status=404), mirror(stall_after=0)
    with pytest.raises(Failure) as failure:
        get(target, cut, silent, missing, refusing_url, "http://mirror.invalid/a.gz", str(target.parent / "nothing.gz"))
    text = str(failure.value)
    for server, reason in ((cut, "stopped at 35 %"), (silent, "timed out"), (missing, "HTTP 404")):
        assert f"{server.url.removeprefix('http://').rstrip('/')}: {reason}" in text
    words = ["mirror.invalid: no network", "refused", "nothing.gz: No such file", str(target), MD5, "--recipe quickstart", "kept"]
    assert all(word in text for word in words)
    assert "\n" not in text and not target.exists()


def test_a_password_in_a_url_is_not_shown(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Failure, match=r"127\.0\.0\.1: not a usable URL") as failure:
        get(target, "http://me:secret@127.0.0.1/a.gz", "http://127.0.0.1:port/a.gz")
    assert "secret" not in str(failure.value) + capsys.readouterr().err


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
            raise OSError(number, os.strerror(number))
        return opened(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(Failure) as failure:
        get(target, mirror())
    assert all(word in str(failure.value) for word in [*words, str(target.parent), "--data-dir"])


def test_a_data_folder_that_cannot_be_made_is_named(tmp_path: Path, mirror: MirrorMaker) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(Failure, match=r"file: File exists.*--data-dir"):
        get(tmp_path / "file" / "a.gz", mirror())


def test_a_source_that_claims_or_gives_too_much_is_left(
    mirror: MirrorMaker, target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    endless, good = mirror(), mirror()
    endless.files = {"a.gz": CONTENT * 2}
    monkeypatch.setattr(download, "MAX_DOWNLOAD", len(CONTENT))
    get(target, endless, good)
    assert target.read_bytes() == CONTENT and "claims 200,000 bytes" in capsys.readouterr().err
    monkeypatch.setattr(download, "_open", lambda url, start: (io.BytesIO(CONTENT * 2), 0, 0))  # without a length
    target.unlink()
    with pytest.raises(Failure, match="gives more than"):
        get(target, endless)
    assert target.with_name("a.gz.part").stat().st_size == 0


# ---- slow mirrors


def test_a_slow_mirror_is_left_for_the_next(mirror: MirrorMaker, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "MEASURE_SECONDS", 0.1)
    slow, quick = mirror(bytes_per_second=50_000), mirror()
    get(target, slow, quick)
    assert target.read_bytes() == CONTENT
    assert len(slow.requests) == 1 and quick.requests[0][1] > 0


@pytest.mark.parametrize(("rates", "requests"), [((30_000, 150_000, 20_000), [1, 2, 1]), ((400_000,), [1])])
def test_when_all_are_slow_the_fastest_finishes_the_file(
    mirror: MirrorMaker, target: Path, monkeypatch: pytest.MonkeyPatch, rates: tuple[int, ...], requests: list[int]
) -> None:
    monkeypatch.setattr(download, "MEASURE_SECONDS", 0.1)
    monkeypatch.setattr(download, "SLOW_RATE", 1e9)
    servers = [mirror(bytes_per_second=rate) for rate in rates]
    get(target, *servers)
    assert target.read_bytes() == CONTENT
    assert [len(server.requests) for server in servers] == requests
