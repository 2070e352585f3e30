from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from local_mirrors import CONTENT, Mirror, MirrorMaker, serving
from own_images import save

from cifar_lit.data import download


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "RETRY_PAUSE", 0.0)
    monkeypatch.setattr(download, "STALL_SECONDS", 0.5)


@pytest.fixture
def mirror() -> Iterator[MirrorMaker]:
    with ExitStack() as stack:

        def start(**behaviour: Any) -> Mirror:
            return stack.enter_context(serving(Mirror(files={"a.gz": CONTENT}, **behaviour)))

        yield start


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "data" / "a.gz"


@pytest.fixture
def refusing_url() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/a.gz"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """train/ with 3 + 2 images and test/ with 1 + 1, whose grey values are 0, 1, 2 … in the order of the paths."""
    root = tmp_path / "pets"
    for value, name in enumerate(
        ("train/cat/0", "train/cat/1", "train/cat/2", "train/dog/0", "train/dog/1", "test/cat/0", "test/dog/0")
    ):
        save(root / f"{name}.png", value)
    return root
