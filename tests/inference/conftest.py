from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from serving import LIMITS, Service, running
from small_nets import write_fitted_net, write_net, write_reject_net

torch.set_num_threads(1)


def _shared(write: Callable[[Path], Path]) -> Callable[..., Path]:
    """Return a fixture with a run folder that tests must not change."""
    return pytest.fixture(scope="session")(lambda tmp_path_factory: write(tmp_path_factory.mktemp("runs") / "run-1"))


run = _shared(write_net)
reject_run = _shared(write_reject_net)
fitted_run = _shared(write_fitted_net)
served_run = _shared(lambda folder: write_net(folder, "lenet", side=16, gain=3, resize="letterbox"))


@pytest.fixture(scope="session")
def service(served_run: Path) -> Iterator[Service]:
    """Return a running service shared by all tests."""
    pytest.importorskip("uvicorn", reason="pip install 'cifar-lit[serve]'")
    with running(served_run, *LIMITS) as opened:
        yield opened
