"""What TensorBoard itself shows of a run, by its data and in a browser."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from browser import Open
from PIL import Image


@pytest.fixture(scope="module")
def board(training: tuple[Path, object]) -> Iterator[str]:
    """The address of a TensorBoard over the training's logs."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    words = ["-m", "tensorboard.main", "--logdir", str(training[0].parent), "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, *words, "--load_fast", "false"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            wait_for(f"http://127.0.0.1:{port}/data/plugin/images/tags", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def get(address: str) -> Any:
    with urllib.request.urlopen(address, timeout=10) as answer:
        return json.load(answer)


def wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    """Returns when TensorBoard has read the run."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, "TensorBoard did not start"
        try:
            if any("test/confusion_matrix" in tags for tags in get(address).values()):
                return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.2)
    raise AssertionError("TensorBoard did not read the run")


def test_it_knows_the_curves_and_the_figures(board: str) -> None:
    scalars = get(f"{board}/data/plugin/scalars/tags")["small-1"]
    assert {"train/loss", "val/accuracy", "test/accuracy", "lr", "weight_norm"} <= set(scalars)
    images = get(f"{board}/data/plugin/images/tags")["small-1"]
    parts = ("confusion_matrix", "accuracy_per_class", "confident_mistakes", "doubtful_hits")
    assert {"images/train", *(f"test/{part}" for part in parts)} <= set(images)
    (entry,) = get(f"{board}/data/plugin/images/images?run=small-1&tag=test%2Fconfident_mistakes&sample=0")
    with urllib.request.urlopen(f"{board}/data/plugin/images/individualImage?{entry['query']}", timeout=10) as answer:
        assert Image.open(BytesIO(answer.read())).size == (720, 576)


def test_its_tabs_show_curves_and_pictures(board: str, open_page: Open) -> None:
    opened = open_page(f"{board}/#images", width=1400, height=1000)
    pictures = opened.page.locator("tf-image-loader img")
    pictures.first.wait_for(state="visible", timeout=30_000)
    opened.page.wait_for_function("() => document.readyState === 'complete'")
    assert pictures.first.evaluate("async one => { await one.decode(); return one.naturalWidth; }") > 100
    opened.page.goto(f"{board}/#timeseries")
    opened.page.locator("scalar-card").first.wait_for(state="visible", timeout=30_000)
    assert opened.page.get_by_text("weight_norm").count() > 0
    assert opened.errors == []
