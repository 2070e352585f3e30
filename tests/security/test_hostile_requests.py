"""Requests that try to read data, take time or memory, or block other clients, sent to a service with default flags.

-m stress sends all of them, other runs a sample.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, suppress
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from extras.serving import Service, form, picture, running
from inference.odd_files import scan_bomb
from inference.small_nets import write_net
from PIL import Image

pytest.importorskip("uvicorn", reason="pip install 'cifar-lit[serve]'")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="measures time and memory in Linux's /proc")

EVERY = 4  # the short form sends every fourth request
MAX_CPU_SECONDS, MAX_MEGABYTES = 1.0, 100.0  # per request, in all processes of the service
LOCAL = "Host: localhost\r\n"
BAD_ORIGIN = LOCAL + "Origin: http://[\r\n"
GZIP = LOCAL + "Content-Encoding: gzip\r\n"
CHUNKED = LOCAL + "Transfer-Encoding: chunked"
EXPECT = LOCAL + "Expect: 100-continue\r\n"


def get(path: str = "/health", headers: str = LOCAL, version: str = "1.1") -> bytes:
    return f"GET {path} HTTP/{version}\r\n{headers}\r\n".encode("latin-1")


def post(
    body: bytes = b"", kind: str = "image/jpeg", headers: str = LOCAL, length: object = None, path: str = "/predict"
) -> bytes:
    length = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\n{headers}Content-Type: {kind}\r\nContent-Length: {length}\r\n\r\n"
    return head.encode("latin-1") + body


def chunked(body: bytes) -> bytes:
    head = f"POST /predict HTTP/1.1\r\n{LOCAL}Content-Type: image/jpeg\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head.encode() + body


def flat(kind: str, mode: str = "RGB", side: int = 4990) -> bytes:
    """An image of 25 million pixels of one colour in few bytes."""
    file = io.BytesIO()
    Image.new(mode, (side, side)).save(file, kind)
    return file.getvalue()


def runs(side: int = 4990) -> bytes:
    """A BMP of 25 million pixels, cut off after 4.9 million runs of one pixel each."""
    data = bytes((1, 7)) * 4_900_000
    header = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, len(data), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 54 + 1024 + len(data), 0, 0, 54 + 1024) + header + bytes(1024) + data


def part(headers: bytes) -> tuple[bytes, str]:
    """A form of one file with these headers."""
    return b"--x\r\n" + headers + b"\r\n\r\n" + picture() + b"\r\n--x--", "multipart/form-data; boundary=x"


def many(data: bytes, count: int) -> bytes:
    body, headers = form(*[("a.png", data)] * count)
    return post(body, headers["Content-Type"])


Made = bytes | Callable[[], bytes]
CLOSED = {0, 400}  # a client that still sends may lose the answer

# The bytes sent, and the permitted statuses; 0 stands for no answer.
REQUESTS: dict[str, tuple[Made, set[int]]] = {
    "two Hosts": (get(headers=LOCAL + "Host: evil.example\r\n"), {400}),
    "no Host": (get(headers=""), {400}),
    "no Host, by HTTP/1.0": (get(headers="", version="1.0"), {400}),
    "another host in the request line": (get("http://evil.example/health", "Host: evil.example\r\n"), {400}),
    "a path with an escape, from an invalid origin": (
        post(b"", headers=BAD_ORIGIN, path="/%1b]0;owned%07%1b[31m"),
        {403},
    ),
    "a path with a line break": (get("/a%0d%0aSet-Cookie:%20a"), {404}),
    "a tunnel to elsewhere": (b"CONNECT evil.example:443 HTTP/1.1\r\nHost: localhost\r\n\r\n", {400, 404, 405}),
    "a JPEG of 3,000 scans": (lambda: post(scan_bomb()), {422}),
    "64 PNGs of 25 million pixels": (lambda: many(flat("PNG"), 64), {422}),
    "a PNG of 25 million clear pixels": (lambda: post(flat("PNG", "RGBA")), {200, 422}),
    "a WebP of 25 million pixels": (lambda: post(flat("WEBP")), {200, 422}),
    "a BMP of 5 million runs": (lambda: post(runs()), {422}),
    "a form of two million parts": (lambda: post(b"--x\r\n" * 1_990_000 + b"\r\n--x--", part(b"")[1]), {400, 413}),
    "a form whose part has a megabyte of headers": (lambda: post(*part(b"a: b\r\n" * 200_000)), {413}),
    "a type of 15,000 semicolons": (post(b"--x--", "multipart/form-data; boundary=x" + ";" * 15_000), {400}),
    "a gigabyte of compressed zeros": (lambda: post(gzip.compress(bytes(100 << 20), 1) * 10, headers=GZIP), {415}),
    "a body in chunks of one byte": (lambda: chunked(b"1\r\nx\r\n" * 3_000_000), CLOSED | {411}),
    "a chunk with an extension of 30 MB": (
        lambda: chunked(b"1;" + b"x" * 30_000_000 + b"\r\nx\r\n0\r\n\r\n"),
        CLOSED | {411},
    ),
    "a million trailers": (lambda: chunked(b"1\r\nx\r\n0\r\n" + b"a: b\r\n" * 1_000_000 + b"\r\n"), CLOSED | {411}),
    "a hundred thousand headers": (lambda: get(headers="a: b\r\n" * 100_000), CLOSED),
    "a header of ten megabytes": (lambda: get(headers=f"a: {'b' * 10_000_000}\r\n"), CLOSED),
    "a URL of a megabyte": (lambda: get("/" + "a" * 1_000_000), CLOSED),
    "ten thousand requests in one": (get() * 10_000, {200}),
    "a request behind a body that is longer than declared": (post(b"\xff\xd8\xff" + get(), length=3), {422}),
    "a body of 10¹⁸ bytes": (post(b"", length=10**18), {413}),
    "a body of -1 bytes": (post(b"", length=-1), {400}),
    "two lengths": (post(b"abc", headers=LOCAL + "Content-Length: 30\r\n"), {400}),
    "a body of 10¹⁸ bytes that waits for 100 Continue": (post(b"", headers=EXPECT, length=10**18), {413}),
    "a header with a NUL": (get(headers=LOCAL + "a: \0\r\n"), {400}),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a small net."""
    return write_net(tmp_path_factory.mktemp("runs") / "run-1", "lenet", side=16)


@pytest.fixture(scope="module")
def service(run: Path) -> Iterator[Service]:
    """A service without flags that must have printed nothing at the end."""
    with running(run) as service:
        yield service
        assert_stops_silently(service)


def assert_stops_silently(service: Service) -> None:
    service.process.terminate()
    assert service.process.stdout is not None and service.process.stdout.read() == "stopped\n"


def answer_to(service: Service, data: bytes, seconds: float = 20) -> tuple[int, bytes]:
    """Return status and body of the response, or 0 and nothing if the connection is closed without one."""
    with socket.create_connection(("127.0.0.1", service.port), timeout=seconds) as connection:
        with suppress(ConnectionError):
            connection.sendall(data)
        with suppress(ConnectionError, HTTPException), closing(HTTPResponse(connection)) as response:
            response.begin()
            return response.status, response.read()
    return 0, b""


def cpu_seconds(service: Service) -> float:
    """Return the CPU time of all processes of the service, including terminated ones."""
    ticks = 0
    for process in service.processes():
        with suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def megabytes(service: Service) -> float:
    """Return the peak memory of the service's main process."""
    lines = Path(f"/proc/{service.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def open_files(service: Service) -> int:
    return len(list(Path(f"/proc/{service.process.pid}/fd").iterdir()))


def test_every_request_gets_a_permitted_status_within_the_limits(
    service: Service, long_form: bool, write_counts: Callable[[dict[str, Any]], None]
) -> None:
    rows: dict[str, dict[str, Any]] = {}
    honest = service.predict(picture()).body
    for name, (made, statuses) in list(REQUESTS.items())[:: 1 if long_form else EVERY]:
        data = made() if callable(made) else made
        Path(f"/proc/{service.process.pid}/clear_refs").write_text("5")  # resets the peak of memory
        cpu, memory = cpu_seconds(service), megabytes(service)
        status, body = answer_to(service, data)
        for _ in service.processes()[2:]:  # the decoders take turns; wait until a lost one is replaced
            assert service.predict(picture()).body == honest, name
        used, grown = round(cpu_seconds(service) - cpu, 2), round(megabytes(service) - memory)
        row = {"status": status, "cpu_seconds": used, "megabytes": grown, "harm": []}
        if status not in statuses:
            row["harm"].append(f"answered with {status} {body[:200]!r}")
        if status >= 400:
            text = json.loads(body)["error"]
            row["answer"] = text
            if not text.isprintable() or len(text) > 300:
                row["harm"].append("the answer is not one line of text")
        if used > MAX_CPU_SECONDS or grown > MAX_MEGABYTES:
            row["harm"].append("it exceeds the limits")
        rows[name] = row
    headline = {
        "hostile requests": len(rows),
        "without harm": sum(not row["harm"] for row in rows.values()),
        "the most of a CPU": round(max(row["cpu_seconds"] for row in rows.values()), 2),
        "the most memory": round(max(row["megabytes"] for row in rows.values())),
    }
    units = dict(zip(headline, ("requests", "requests", "s", "MB"), strict=True))
    write_counts({"requests": rows, "headline": headline, "unit": units})
    assert {name: row for name, row in rows.items() if row["harm"]} == {}


# ---- many clients

HEAD = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/jpeg\r\n"
SLOW = {  # the first bytes of a slow client, and those it sends from time to time
    "headers": (HEAD, b"x"),
    "bodies": (HEAD + b"Content-Length: 9000000\r\n\r\n" + bytes(200_000), b"x"),
    "readers": (get("/page.js"), b""),
    "idlers": (b"", b""),
}


@pytest.mark.slow
def test_more_slow_clients_than_connections_block_nobody(run: Path, long_form: bool) -> None:
    count = 1000 if long_form else 200
    with running(run, files=0 if long_form else 256) as service:
        for kind, (first, further) in SLOW.items():
            with ExitStack() as sockets:
                clients = []
                for _ in range(count):
                    client = socket.create_connection(("127.0.0.1", service.port), timeout=20)
                    clients.append(sockets.enter_context(client))
                    client.setblocking(False)
                    with suppress(OSError):
                        client.send(first)
                for number in range(50):
                    assert service.predict(picture()).status == 200, kind
                    for client in clients[number % 10 :: 10]:
                        with suppress(OSError):
                            client.send(further)
        assert_stops_silently(service)


def test_stalled_large_bodies_are_dropped_for_other_clients(service: Service) -> None:
    with ExitStack() as clients, ThreadPoolExecutor(40) as threads:
        Path(f"/proc/{service.process.pid}/clear_refs").write_text("5")
        memory = megabytes(service)
        sockets = [clients.enter_context(socket.create_connection(("127.0.0.1", service.port))) for _ in range(40)]
        head = HEAD + b"Content-Length: 9900000\r\n\r\n"
        wait([threads.submit(client.sendall, head + bytes(9_000_000)) for client in sockets], 5)
        assert service.predict(picture(size=(1700, 1700), kind="BMP")).status == 200  # 8.7 MB
        assert megabytes(service) - memory < 500
        for client in sockets:
            with suppress(OSError):  # the service has closed it
                client.shutdown(socket.SHUT_RDWR)


@pytest.mark.slow
def test_a_response_that_is_not_read_is_dropped_with_its_connection(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (224, 224, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "JPEG", quality=30)
    body, headers = form(*[("a.jpg", file.getvalue())] * 40)  # answered with 8 MB
    run = write_net(tmp_path / "run", "lenet", side=224)
    with running(run, pause=0.5) as service, socket.socket() as client:
        before = open_files(service)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2304)
        client.connect(("127.0.0.1", service.port))
        client.sendall(post(body, headers["Content-Type"], path="/predict?seen=1"))
        assert len(client.recv(100)) == 100
        assert open_files(service) > before
        end = time.monotonic() + 20
        while open_files(service) > before and time.monotonic() < end:
            time.sleep(0.1)
        assert time.monotonic() < end
