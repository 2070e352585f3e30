from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_nets import write_fitted_net, write_net, write_novelty_net

torch.set_num_threads(1)

# Run folders that tests leave as they are.


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A net of random weights."""
    return write_net(tmp_path_factory.mktemp("net"))


@pytest.fixture(scope="session")
def novelty_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with novelty data."""
    return write_novelty_net(tmp_path_factory.mktemp("novelty"))


@pytest.fixture(scope="session")
def fitted_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A net of drawn figures that decides with confidence."""
    return write_fitted_net(tmp_path_factory.mktemp("fitted") / "shapes-1")


@pytest.fixture(scope="session")
def served_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny net of 16 × 16 images for services."""
    return write_net(tmp_path_factory.mktemp("served"), "lenet", side=16, gain=3)


@pytest.fixture
def no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets exports take two turns of time instead of seconds."""
    from cifar_lit.inference.export import latencies

    monkeypatch.setattr("cifar_lit.inference.export.latencies", lambda *args: latencies(*args, seconds=0, min_turns=1))
