"""Services for tests, each in processes of its own, and requests to them."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

ROOT = Path(__file__).parent.parent.parent
JPEG = {"Content-Type": "image/jpeg"}
LIMITS = ("--max-mb", 1.5, "--max-pixels", 24_500_000, "--max-images", 40, "--decode-seconds", 3, "--body-seconds", 1)


def picture(seed: int = 0, size: tuple[int, int] = (40, 30), kind: str = "JPEG") -> bytes:
    """A file with soft colours that differ by seed."""
    colours = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(colours).resize(size, Image.Resampling.BICUBIC).save(file, kind)
    return file.getvalue()


def form(*files: tuple[str, bytes]) -> tuple[bytes, dict[str, str]]:
    """The body and the type of a form with files."""
    parts = [
        f'--x-y\r\nContent-Disposition: form-data; name="image"; filename="{name}"\r\n\r\n'.encode() + data + b"\r\n"
        for name, data in files
    ]
    return b"".join(parts) + b"--x-y--\r\n", {"Content-Type": "multipart/form-data; boundary=x-y"}


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The error in words, after checking that it is one line of JSON without a traceback."""
        assert self.headers["content-type"] == "application/json"
        (text,) = self.json.values()
        assert list(self.json) == ["error"] and text and "\n" not in text and "Traceback" not in text
        return str(text)


class Service(NamedTuple):
    """A service that runs. lines: what it printed until it was ready."""

    process: subprocess.Popen[str]
    port: int
    lines: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """Answer to one request over a connection of its own."""
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return Answer(
                response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
            )

    def predict(self, body: Any, headers: dict[str, str] | None = None, query: str = "") -> Answer:
        return self.ask("POST", f"/predict{query}", body, headers or JPEG)

    def processes(self) -> list[int]:
        """Every process of the service, the first one first; those that it started have none of their own."""
        pid = self.process.pid
        return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def alive(process: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def running(run: Path, *flags: object, files: int = 0) -> Iterator[Service]:
    """A service on a free port, in a group of processes of its own; nothing of it is left afterwards.

    files: how many it may open, 0 for as many as this process.
    """
    line = [sys.executable, "-m", "cifar_lit", "serve", str(run), "--port", "0", *map(str, flags)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    settings: dict[str, Any] = {"text": True, "env": {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}}
    if files:
        line = ["bash", "-c", f'ulimit -n {files}; exec "$@"', "bash", *line]
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, **settings
    ) as process:
        try:
            lines: list[str] = []
            assert process.stdout is not None
            for text in process.stdout:
                lines.append(text.rstrip())
                if "http://" in text:
                    break
            assert lines and "http://" in lines[-1], lines
            yield Service(process, int(lines[-1].partition("http://")[2].split()[0].rpartition(":")[2]), lines)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
