"""`fetch` tries mirrors in turn, resumes broken transfers and verifies files."""

from __future__ import annotations

import errno
import hashlib
import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from local_mirrors import Mirror, serving

from cifar_lit.base.errors import Failure
from cifar_lit.data import download
from cifar_lit.data.download import fetch

CONTENT = random.Random(0).randbytes(100_000)
MD5 = hashlib.md5(CONTENT).hexdigest()
REFUSING = "http://127.0.0.1:9/a.gz"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "RETRY_PAUSE", 0.0)
    monkeypatch.setattr(download, "STALL_SECONDS", 0.3)


@pytest.fixture
def mirror() -> Iterator[Callable[..., Mirror]]:
    with ExitStack() as stack:
        yield lambda **behaviour: stack.enter_context(serving(Mirror({"a.gz": CONTENT}, **behaviour)))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data" / "a.gz"


def get(target: Path, *mirrors: Mirror | str) -> Path:
    return fetch("a.gz", [each if isinstance(each, str) else f"{each.url}a.gz" for each in mirrors], MD5, target)


def put_part(target: Path, content: bytes | None) -> None:
    """Write the partial file of an earlier transfer."""
    if content is not None:
        target.with_name("a.gz.part").write_bytes(content)


def test_a_file_is_downloaded_once_from_the_first_mirror(
    mirror: Callable[..., Mirror], target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = mirror(), mirror()
    for _ in range(2):
        assert get(target, first, second) == target and target.read_bytes() == CONTENT
    assert len(first.requests) == 1 and second.requests == [] and list(target.parent.iterdir()) == [target]
    line = capsys.readouterr().err
    assert f"a.gz from {first.url.split('/')[2]}" in line and "MB/s" in line


def test_a_wrong_file_at_the_target_is_reported_and_kept(target: Path) -> None:
    target.write_bytes(b"mine")
    digest = f"is damaged or another file: its md5 is {hashlib.md5(b'mine').hexdigest()}, expected {MD5}; delete"
    with pytest.raises(Failure, match=rf"a\.gz {digest}"):
        get(target)
    assert target.read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("behaviour", "part", "requests"),
    [
        ({"cuts": [30_000, 30_000]}, None, [0, 30_000, 60_000]),
        ({}, CONTENT[:70_000], [70_000]),
        ({}, CONTENT, [len(CONTENT), 0]),  # complete, but not renamed
        ({}, CONTENT + b"more", [len(CONTENT) + 4, 0]),
        ({}, b"\0" * 50_000, [50_000, 0]),  # wrong content
        ({"ranges": False}, CONTENT[:40_000], [40_000]),
    ],
    ids=["broken", "part", "whole part", "long part", "wrong part", "range ignored"],
)
def test_a_transfer_resumes_or_starts_again_from_a_wrong_part(
    mirror: Callable[..., Mirror], target: Path, behaviour: dict[str, Any], part: bytes | None, requests: list[int]
) -> None:
    server = mirror(**behaviour)
    put_part(target, part)
    get(target, server)
    assert target.read_bytes() == CONTENT and [start for _, start in server.requests] == requests


@pytest.mark.parametrize(
    ("behaviour", "part", "attempts", "start"),
    [
        ({"corrupt": True}, None, 1, 0),
        ({"corrupt": True, "cuts": [50_000]}, None, 3, 0),  # retried from byte 0
        ({"content_type": "text/html; charset=utf-8", "ranges": False}, CONTENT[:90_000], 1, 90_000),  # a log-in page
        ({"status": 404}, None, 1, 0),
        ({"stall_after": 0}, CONTENT[:20_000], 1, 20_000),
    ],
    ids=["corrupt", "corrupt and broken", "log-in page", "missing", "stalling"],
)
def test_the_next_mirror_continues_from_the_valid_bytes(
    mirror: Callable[..., Mirror],
    target: Path,
    behaviour: dict[str, Any],
    part: bytes | None,
    attempts: int,
    start: int,
) -> None:
    bad, good = mirror(), mirror()
    for name, value in behaviour.items():
        setattr(bad, name, value)
    put_part(target, part)
    get(target, REFUSING, bad, good)
    assert target.read_bytes() == CONTENT
    assert len(bad.requests) == attempts and good.requests == [("a.gz", start)]


@pytest.mark.parametrize("promised", [0, 50_000, 200_000])
def test_a_mirror_with_a_wrong_length_is_skipped(mirror: Callable[..., Mirror], target: Path, promised: int) -> None:
    get(target, mirror(promised=promised), mirror())
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize("as_url", [True, False], ids=["file url", "plain path"])
def test_a_local_copy_is_a_valid_source(tmp_path: Path, target: Path, as_url: bool) -> None:
    copy = tmp_path / "copy of a.gz"
    copy.write_bytes(CONTENT)
    put_part(target, CONTENT[:10])
    get(target, copy.as_uri() if as_url else str(copy))
    assert target.read_bytes() == CONTENT


def test_if_all_mirrors_fail_the_error_names_each_reason_and_a_remedy_without_passwords(
    mirror: Callable[..., Mirror], target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(download, "ATTEMPTS", 1)
    cut, missing, silent = mirror(cuts=[35_900]), mirror(status=404), mirror(stall_after=0)
    with pytest.raises(Failure) as failure:
        get(
            target,
            cut,
            silent,
            missing,
            REFUSING,
            "http://me:secret@127.0.0.1:port/a.gz",
            str(target.parent / "nothing.gz"),
        )
    text = str(failure.value)
    for server, reason in ((cut, "stopped at 35 %"), (silent, "stopped at 35 %"), (missing, "HTTP Error 404")):
        assert f"{server.url.split('/')[2]}: {reason}" in text
    words = ["127.0.0.1:port: ", "9: Connection refused", "nothing.gz: No such file"]
    words += [str(target), MD5, "--data.url", "--recipe quickstart", "kept"]
    assert [word for word in words if word not in text] == []
    assert "\n" not in text and not target.exists() and "secret" not in text + capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "word"), [(errno.ENOSPC, "disk is full: free some space"), (errno.EACCES, "Permission denied")]
)
def test_a_write_error_names_the_folder(
    mirror: Callable[..., Mirror], target: Path, monkeypatch: pytest.MonkeyPatch, number: int, word: str
) -> None:
    opened = Path.open

    def refuse(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if "w" in mode and path.suffix == ".part":
            raise OSError(number, os.strerror(number))
        return opened(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(Failure, match=rf"{word}.*--data-dir") as failure:
        get(target, mirror())
    assert str(target.parent) in str(failure.value)
