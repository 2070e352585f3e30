from __future__ import annotations

import socket
from pathlib import Path

import pytest
from downloading import CONTENT, MD5, MirrorMaker, get

from cifar_lit.data import download
from cifar_lit.errors import Failure

pytestmark = pytest.mark.usefixtures("impatient")


def test_a_mirror_that_is_down_a_missing_file_and_a_stalling_one_give_way_to_the_next(
    mirror: MirrorMaker, target: Path, refusing_url: str
) -> None:
    missing, stalling, good = mirror(status=404), mirror(stall_after=20_000), mirror()
    get(target, refusing_url, missing, stalling, good)
    assert target.read_bytes() == CONTENT
    assert len(stalling.asked) == 1
    assert good.asked == [("a.gz", 20_000)]


def test_when_all_fail_each_source_tells_its_reason_and_the_way_out_is_named(
    mirror: MirrorMaker, target: Path, refusing_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_names(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    connect = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest, **kw: (no_names if host == "mirror.invalid" else connect)(host, *rest, **kw)
    )
    monkeypatch.setattr(download, "MAX_ATTEMPTS", 1)
    cut, missing, silent = mirror(cuts=[35_900]), mirror(status=404), mirror(stall_after=0)
    nowhere = "http://mirror.invalid/a.gz"
    with pytest.raises(Failure) as failure:
        get(target, cut, silent, missing, refusing_url, nowhere, str(target.parent / "nothing.gz"))
    text = str(failure.value)
    for url, reason in ((cut.url, "stopped at 35 %"), (silent.url, "timed out"), (missing.url, "HTTP 404")):
        assert f"{url.removeprefix('http://').rstrip('/')}: {reason}" in text
    assert "mirror.invalid: no network" in text
    assert "refused" in text and "nothing.gz: No such file" in text
    assert str(target) in text and MD5 in text and "--recipe quickstart" in text and "kept" in text
    assert "\n" not in text
    assert not target.exists()


def test_a_password_in_a_url_is_not_shown(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Failure, match=r"127\.0\.0\.1: not a usable URL") as failure:
        get(target, "http://me:secret@127.0.0.1/a.gz", "http://127.0.0.1:port/a.gz")
    assert "secret" not in str(failure.value) + capsys.readouterr().err


def test_a_slow_mirror_is_left_for_the_next(mirror: MirrorMaker, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "MEASURE_SECONDS", 0.1)
    slow, quick = mirror(bytes_per_second=50_000), mirror()
    get(target, slow, quick)
    assert target.read_bytes() == CONTENT
    assert len(slow.asked) == 1
    assert quick.asked[0][1] > 0


def test_when_all_are_slow_the_fastest_finishes_the_file(
    mirror: MirrorMaker, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "MEASURE_SECONDS", 0.1)
    monkeypatch.setattr(download, "SLOW_RATE", 1e9)
    faster, slower, slowest = mirror(bytes_per_second=150_000), mirror(bytes_per_second=30_000), mirror(bytes_per_second=20_000)
    get(target, slower, faster, slowest)
    assert target.read_bytes() == CONTENT
    assert [len(server.asked) for server in (slower, faster, slowest)] == [1, 2, 1]


def test_the_only_source_may_be_as_slow_as_it_is(mirror: MirrorMaker, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "MEASURE_SECONDS", 0.05)
    monkeypatch.setattr(download, "SLOW_RATE", 1e9)
    server = mirror(bytes_per_second=400_000)
    get(target, server)
    assert len(server.asked) == 1
