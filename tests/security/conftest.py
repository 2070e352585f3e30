"""The genuine run from which hostile files and attacks are made."""

from __future__ import annotations

from pathlib import Path

import pytest
from security.sandbox import SMALL, read_in_fork
from stress.forked import warm

from cifar_lit.cli import main


@pytest.fixture(scope="session")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder (read-only) of a training followed by its test; its recipe is small.yaml, two folders above."""
    warm()  # import once, so that measurements in forks exclude it
    folder = tmp_path_factory.mktemp("genuine")
    (folder / "small.yaml").write_text(SMALL)
    answer = read_in_fork(folder, lambda: main(["train", "--recipe", "small.yaml", "--logs", "runs"]))
    assert answer.code == 0, answer.lines
    return folder / "runs" / "small-1"
