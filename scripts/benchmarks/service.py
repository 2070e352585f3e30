"""A service in processes of its own, as a user starts it, and a small HTTP client that costs next to nothing."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cifar_lit.bench.process import environment
from cifar_lit.errors import Failure, UsageError

ANSWER_SECONDS = 60.0  # after which a request counts as lost


@dataclass(frozen=True)
class Service:
    """A service that answers. start_seconds: from the start of its process to its readiness. net: the one it serves."""

    process: subprocess.Popen[str]
    host: str
    port: int
    start_seconds: float
    net: str

    def memory(self) -> float | None:
        """MB of all its processes, shared pages counted once (PSS); None where /proc does not tell."""
        sizes = []
        for process in _with_children(self.process.pid):
            try:
                lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
            except OSError:
                return None
            sizes += [int(line.split()[1]) for line in lines if line.startswith("Pss:")]
        return sum(sizes) / 1000


def _with_children(process: int) -> list[int]:
    children = Path(f"/proc/{process}/task/{process}/children")
    found = children.read_text().split() if children.exists() else []
    return [process, *(one for child in found for one in _with_children(int(child)))]


@contextmanager
def started(words: Sequence[str]) -> Iterator[Service]:
    """Runs `cifar-lit serve` with these words on a free port, and stops it in the end.

    Raises UsageError or Failure, as the process ended, with the last line that it printed.
    """
    with tempfile.TemporaryFile("w+") as errors:
        before = time.perf_counter()
        line = [sys.executable, "-m", "cifar_lit", "serve", *words, "--port", "0"]
        with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment()) as process:
            assert process.stdout is not None
            try:
                net = "?"
                for said in process.stdout:
                    if said.startswith("serving "):
                        net = said.split()[1]
                    if "http://" in said:
                        host, _, port = said.split("http://")[1].split()[0].rpartition(":")
                        yield Service(process, host, int(port), time.perf_counter() - before, net)
                        break
                else:
                    process.wait()
                    errors.seek(0)
                    last = (errors.read().strip().splitlines() or [f"the service ended with exit code {process.returncode}"])[-1]
                    raise (UsageError if process.returncode == 2 else Failure)(last.removeprefix("cifar-lit: "))
            finally:
                process.terminate()


def predict_request(body: bytes, content_type: str = "image/jpeg") -> bytes:
    """The bytes of a POST /predict."""
    head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Connection:
    """A connection that is kept open, for one request after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, service: Service) -> Connection:
        """A connection to a service."""
        return cls(*await asyncio.open_connection(service.host, service.port))

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Sends the bytes of a request; the status and body of its answer, which may come before all is sent."""
        self._writer.write(request)
        return await self.answer()

    async def answer(self) -> tuple[int, bytes]:
        """The status and body of the next answer; raises Failure when there is none."""
        try:
            head = (await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), ANSWER_SECONDS)).lower().split(b"\r\n")
            length = next(int(line.partition(b":")[2]) for line in head if line.startswith(b"content-length:"))
            return int(head[0].split()[1]), await self._reader.readexactly(length)
        except (TimeoutError, OSError, EOFError, StopIteration) as error:
            raise Failure(f"the service gave no answer ({type(error).__name__}): see what it printed") from None

    def close(self) -> None:
        """Closes it, whatever is still unsent."""
        self._writer.transport.abort()


async def once(service: Service, request: bytes) -> tuple[int, bytes]:
    """The status and body of the answer to one request over a connection of its own."""
    connection = await Connection.to(service)
    try:
        return await connection.ask(request)
    finally:
        connection.close()


def error_of(body: bytes) -> str:
    """The line in a JSON error; raises ValueError for anything else."""
    found = json.loads(body)
    if not isinstance(found, dict) or not isinstance(found.get("error"), str):
        raise ValueError(f"no JSON error: {body[:200]!r}")
    return str(found["error"])
