"""Services of a tiny net for tests, each in processes of its own, and requests to them."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from cifar_lit.models.registry import build_net
from cifar_lit.runs.model_file import ModelCard, save_weights

ROOT = Path(__file__).parent.parent.parent
CLASSES = ["disc", "ring", "bar", "star"]
JPEG = {"Content-Type": "image/jpeg"}


def write_net(folder: Path) -> Path:
    """A `model.safetensors` of a small net for 16 × 16 images with random weights."""
    torch.manual_seed(0)
    net = build_net("lenet", channels=3, image_size=(16, 16), num_classes=4, width=1.0, options={})
    for parameter in net.parameters():
        parameter.data *= 3  # so that its answers differ from picture to picture
    card = ModelCard("lenet", 1.0, [3, 16, 16], CLASSES, [0.5] * 3, [0.25] * 3)
    save_weights(folder / "model.safetensors", net.state_dict(), card)
    return folder / "model.safetensors"


def picture(seed: int = 0, size: tuple[int, int] = (40, 30), kind: str = "JPEG") -> bytes:
    """A file with soft colours that differ by seed."""
    colours = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(colours).resize(size, Image.Resampling.BICUBIC).save(file, kind)
    return file.getvalue()


@dataclass
class Answer:
    """An HTTP answer, with the seconds that it took."""

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The error in words, after checking that it is one line of JSON without a traceback."""
        assert self.headers["content-type"] == "application/json"
        assert list(self.json) == ["error"]
        text = self.json["error"]
        assert isinstance(text, str)
        assert text
        assert "\n" not in text
        assert "Traceback" not in text
        return text


@dataclass
class Service:
    """A service that runs. said: the lines that it printed when it was ready."""

    process: subprocess.Popen[str]
    port: int
    said: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """Answer to one request over a connection of its own."""
        before = time.perf_counter()
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body, headers or {})
            found = connection.getresponse()
            headers = {name.lower(): value for name, value in found.getheaders()}
            return Answer(found.status, headers, found.read(), time.perf_counter() - before)
        finally:
            connection.close()

    def predict(self, body: Any, headers: dict[str, str] | None = None, query: str = "") -> Answer:
        return self.ask("POST", f"/predict{query}", body, headers or JPEG)

    def sent(self, data: bytes, seconds: float = 10) -> bytes:
        """What comes back for raw bytes until the service closes the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as connection:
            connection.sendall(data)
            found = b""
            while more := connection.recv(65536):
                found += more
            return found

    def processes(self) -> list[int]:
        """Every process of the service, the first one first."""
        return with_children(self.process.pid)


def with_children(process: int) -> list[int]:
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [process, *(one for child in found for one in with_children(int(child)))]


def alive(process: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def form(*files: tuple[str, bytes], field: str = "image") -> tuple[bytes, dict[str, str]]:
    """The body and the type of a form with files."""
    parts = [
        f'--x-y\r\nContent-Disposition: form-data; name="{field}"; filename="{name}"\r\n\r\n'.encode() + data + b"\r\n"
        for name, data in files
    ]
    return b"".join(parts) + b"--x-y--\r\n", {"Content-Type": "multipart/form-data; boundary=x-y"}


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@contextmanager
def running(net: Path, *flags: object) -> Iterator[Service]:
    """A service on a free port, in a group of processes of its own; nothing of it is left afterwards."""
    line = [sys.executable, "-m", "cifar_lit", "serve", str(net), "--port", "0", *map(str, flags)]
    settings: dict[str, Any] = {"text": True, "env": environment(), "start_new_session": True}
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **settings) as process:
        try:
            said = []
            assert process.stdout is not None
            for text in process.stdout:
                said.append(text.rstrip())
                if "http://" in text:
                    break
            assert said, "the service printed nothing"
            assert "http://" in said[-1], said
            yield Service(process, int(said[-1].partition("http://")[2].split()[0].rpartition(":")[2]), said)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
