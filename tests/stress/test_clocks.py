"""A machine that sleeps in the middle of a training, and clocks that jump: it ends as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy
from stress.compare_runs import differences, run_in
from stress.fault_hooks import CLOCK
from stress.forked import LIMIT, SMALL_TRAINING, Forked, size

from cifar_lit.cli import main

RANK_TIMEOUT = 2.0
SLEEP = 3 * RANK_TIMEOUT  # longer than a rank may be silent, and than its watchdog waits
DAY = 24 * 3600
TRAINING = [*SMALL_TRAINING, "--rank-timeout", str(RANK_TIMEOUT)]
ANNOUNCE, JUMP = (f"--trainer.callbacks=stress.fault_hooks.{name}" for name in ("Announce", "ClockJump"))


def impatient(line: list[str]) -> int:
    """A command under time-outs of torch's (half an hour, as it is) that are shorter than the sleep, which counts for them."""
    defaults = DDPStrategy.__init__.__defaults__ or ()
    DDPStrategy.__init__.__defaults__ = tuple(
        timedelta(seconds=SLEEP / 2) if isinstance(one, timedelta) else one for one in defaults
    )
    return main(line)


def ended_run(training: Forked, folder: Path) -> Path:
    """The run of a training that has come to a good end."""
    training.finish()
    run = run_in(folder / "lightning_logs")
    assert run is not None
    return run


@cache
def undisturbed(processes: int, folder: Path) -> Path:
    """A run that nothing happens to."""
    return ended_run(Forked(TRAINING, folder, folder / "log.txt", processes), folder)


def missed(run: Path, processes: int, seconds: float, folder: Path) -> list[str]:
    """In what a run differs from an undisturbed one in `folder`; `seconds` is the most that it may say it took."""
    took = json.loads((run / "metrics.json").read_text())["train_seconds"]
    expected = undisturbed(processes, folder / f"undisturbed-{processes}")
    return differences(run, expected) + [f"train_seconds is {took}"] * (not 0 < took < seconds)


def sleep_through(processes: int, phase: str, seconds: float, folder: str) -> list[str]:
    """What a training misses whose processes are all stopped in a phase, and go on that much later."""
    training = Forked(lambda: impatient([*TRAINING, ANNOUNCE]), Path(folder), Path(folder) / "log.txt", processes)
    while training.count(phase) < 2:
        assert training.listen(1.0), training.log.read_text()[-2000:]
    training.send(signal.SIGSTOP)
    time.sleep(seconds)
    training.send(signal.SIGCONT)
    return missed(
        ended_run(training, Path(folder)), processes, time.monotonic() - training.started, Path(folder).parents[1]
    )


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_machine_that_sleeps_longer_than_a_process_may_be_silent_loses_nothing(
    long_form: bool, forking: Callable[..., Any], tmp_path: Path
) -> None:
    for phase in ("training", "validation", "checkpoint: writing") if long_form else ("training",):
        seconds = size("SLEEP", 20) if long_form else SLEEP
        for processes in (1, 2) if long_form else (2,):
            folder = str(tmp_path / f"{phase}-{processes}")
            assert forking(sleep_through, processes=processes, phase=phase, seconds=seconds, folder=folder) == []


def jump(seconds: int, folder: str) -> list[str]:
    """What a training misses in whose middle the time of day jumped."""
    training = Forked([*TRAINING, JUMP], Path(folder), Path(folder) / "log.txt", more={CLOCK: str(seconds)})
    return missed(ended_run(training, Path(folder)), 1, LIMIT, Path(folder).parent)


@pytest.mark.parametrize("seconds", [DAY, -DAY])
def test_a_clock_that_jumps_by_a_day_changes_nothing(seconds: int, forking: Callable[..., Any], tmp_path: Path) -> None:
    assert forking(jump, seconds=seconds, folder=str(tmp_path)) == []
