"""Start services in their own processes, and send requests to them."""

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
import pytest
from PIL import Image

ROOT = Path(__file__).parent.parent.parent
JPEG = {"Content-Type": "image/jpeg"}
LIMITS = ("--max-mb", 2, "--max-pixels", 24_500_000)
PROGRAM = """
import sys
from cifar_lit.cli import main
from cifar_lit.extras.serve import connections
connections.BODY_SECONDS = {}
sys.exit(main())
"""


def picture(seed: int = 0, size: tuple[int, int] = (40, 30), kind: str = "JPEG") -> bytes:
    """Return an image file with smooth colours that depend on the seed."""
    colours = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(colours).resize(size, Image.Resampling.BICUBIC).save(file, kind)
    return file.getvalue()


def form(*files: tuple[str, bytes]) -> tuple[bytes, dict[str, str]]:
    """Return the body and headers of a form with files."""
    head = '--x-y\r\nContent-Disposition: form-data; name="image"; filename="{}"\r\n\r\n'
    parts = b"".join(head.format(name).encode() + data + b"\r\n" for name, data in files)
    return parts + b"--x-y--\r\n", {"Content-Type": "multipart/form-data; boundary=x-y"}


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """Return the error message, after checking that it is one line of JSON without a traceback."""
        assert self.headers["content-type"] == "application/json"
        (text,) = self.json.values()
        assert list(self.json) == ["error"] and text and "\n" not in text and "Traceback" not in text
        return str(text)


class Service(NamedTuple):
    """A running service, with the lines that it printed until it was ready."""

    process: subprocess.Popen[str]
    port: int
    lines: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """Send one request over a new connection and return the answer."""
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            fields = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, fields, response.read())

    def predict(self, body: Any, headers: dict[str, str] | None = None, query: str = "") -> Answer:
        return self.ask("POST", f"/predict{query}", body, headers or JPEG)

    def processes(self) -> list[int]:
        """Return the process ids of the service, its main process first."""
        pid = self.process.pid
        return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def alive(process: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def running(
    run: Path, *flags: object, files: int = 0, command: str = "serve", pause: float = 10.0
) -> Iterator[Service]:
    """Run a service on a free port in its own process group, and end all of its processes afterwards.

    Args:
        files: limit of open files; 0 keeps the limit of this process.
        command: serve or review.
        pause: seconds for which a client may pause.
    """
    words = [sys.executable, "-c", PROGRAM.format(pause), command, str(run), "--port", "0", *map(str, flags)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    settings: dict[str, Any] = {"text": True, "stderr": subprocess.STDOUT, "env": env}
    if files:
        words = ["bash", "-c", f'ulimit -n {files}; exec "$@"', "bash", *words]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True, **settings) as process:
        try:
            lines: list[str] = []
            assert process.stdout is not None
            for text in process.stdout:
                lines.append(text.rstrip())
                if "http://" in text:
                    break
            assert lines and "http://" in lines[-1], lines
            yield Service(process, int(lines[-1].partition("http://")[2].split()[0].split(":")[1].split("/")[0]), lines)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def service(served_run: Path) -> Iterator[Service]:
    """Return a running service shared by all tests."""
    pytest.importorskip("uvicorn", reason="pip install 'cifar-lit[serve]'")
    with running(served_run, *LIMITS, pause=1.0) as opened:
        yield opened
