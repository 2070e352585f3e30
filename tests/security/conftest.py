"""The genuine run that hostile files and attacks start from."""

from __future__ import annotations

from pathlib import Path

import pytest
from security.sandbox import SMALL, read_apart
from stress.forked import warm

from cifar_lit.cli import main


@pytest.fixture(scope="session")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a training with its test, by small.yaml two folders above; to be left as it is."""
    warm()  # here and not in each process, so that imports are not counted
    folder = tmp_path_factory.mktemp("genuine")
    (folder / "small.yaml").write_text(SMALL)
    answer = read_apart(folder, lambda: main(["train", "--recipe", "small.yaml", "--logs", "runs"]))
    assert answer.code == 0, answer.lines
    return folder / "runs" / "small-1"
