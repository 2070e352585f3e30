from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from downloading import CONTENT, MirrorMaker
from local_server import Mirror, serving

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
