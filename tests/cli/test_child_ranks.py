"""Ranks that this process has started end with it, also when they hang, and it ends with them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cifar_lit.cli import ranks
from cifar_lit.cli.ranks import ChildRanks

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process that never ends by itself."""
    monkeypatch.setattr(ranks, "EXIT_SECONDS", 0.1)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def trainer_of(*started: subprocess.Popen[bytes]) -> Any:
    return SimpleNamespace(strategy=SimpleNamespace(launcher=SimpleNamespace(procs=[*started])))


@pytest.mark.parametrize("is_watched", [True, False])
def test_a_rank_that_hangs_is_killed_at_the_end(rank: subprocess.Popen[bytes], is_watched: bool) -> None:
    trainer, child_ranks = trainer_of(rank), ChildRanks()
    if is_watched:
        child_ranks.setup(trainer, None, "fit")  # type: ignore[arg-type]
        assert trainer.strategy.launcher.procs == []  # else Lightning's observer would kill this process
    rank.send_signal(signal.SIGSTOP)
    child_ranks.end(trainer)
    assert rank.returncode == -signal.SIGKILL


def test_a_failed_rank_ends_a_process_that_would_wait_for_it(
    rank: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(3)"]) as failing:
        ChildRanks().setup(trainer_of(rank, failing), None, "fit")  # type: ignore[arg-type]
        while not codes:
            time.sleep(0.05)
    assert codes == [1] and rank.poll() == -signal.SIGKILL
    assert "another process of this run failed" in capsys.readouterr().err
