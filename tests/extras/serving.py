"""Start services in their own processes, and make the pictures that are sent to them."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

ROOT = Path(__file__).parent.parent.parent


def picture(seed: int = 0, size: tuple[int, int] = (40, 30), kind: str = "JPEG") -> bytes:
    """Return an image file with smooth colours that depend on the seed."""
    colours = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(colours).resize(size, Image.Resampling.BICUBIC).save(file, kind)
    return file.getvalue()


def png(image: np.ndarray) -> tuple[str, bytes]:
    """Return an image, uint8 (H, W, 3), as a named file for `Service.predict`."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return "a.png", file.getvalue()


class Running(NamedTuple):
    """A running service: the address of its page, and the lines that it printed until it was ready."""

    process: subprocess.Popen[str]
    url: str
    lines: list[str]


@contextmanager
def running(run: Path, *flags: object, command: str = "serve") -> Iterator[Running]:
    """Run `serve` or `review` on a free port, and end it afterwards."""
    words = [sys.executable, "-m", "cifar_lit", command, str(run), "--port", "0", *map(str, flags)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            lines = []
            for text in process.stdout:
                lines.append(text.rstrip())
                if "http://" in text:
                    break
            assert lines and "http://" in lines[-1], lines
            yield Running(process, "http://" + lines[-1].partition("http://")[2].split()[0], lines)
        finally:
            process.terminate()
