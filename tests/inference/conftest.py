from __future__ import annotations

from pathlib import Path

import pytest
from small_net import write_net


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a net of random weights; to be left as it is."""
    return write_net(tmp_path_factory.mktemp("net"))


@pytest.fixture(scope="session")
def telling_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, with what tells images that are unlike those of the training; to be left as it is."""
    return write_net(tmp_path_factory.mktemp("telling"), novelty=True)
