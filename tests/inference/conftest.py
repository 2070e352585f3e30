from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_nets import write_fitted_net, write_net, write_novelty_net

torch.set_num_threads(1)


def _shared(write: Callable[[Path], Path]) -> Callable[..., Path]:
    """A run folder that tests leave as it is."""
    return pytest.fixture(scope="session")(lambda tmp_path_factory: write(tmp_path_factory.mktemp("runs") / "run-1"))


run = _shared(write_net)
novelty_run = _shared(write_novelty_net)
fitted_run = _shared(write_fitted_net)
served_run = _shared(lambda folder: write_net(folder, "lenet", side=16, gain=3))


@pytest.fixture
def no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets exports take two turns of time instead of seconds."""
    monkeypatch.setattr("cifar_lit.inference.export.TIMING_SECONDS", 0)
    monkeypatch.setattr("cifar_lit.inference.export.MIN_TURNS", 1)
