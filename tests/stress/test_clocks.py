"""A training gives the same result on a machine that sleeps or whose clock jumps."""

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
SLEEP = 3 * RANK_TIMEOUT  # longer than the rank timeout and the watchdog's
DAY = 24 * 3600
TRAINING = [*SMALL_TRAINING, "--rank-timeout", str(RANK_TIMEOUT)]
ANNOUNCE, JUMP = (f"--trainer.callbacks=stress.fault_hooks.{name}" for name in ("Announce", "ClockJump"))


def train_with_short_timeouts() -> int:
    """Train with timeouts of torch.distributed that are shorter than the sleep, instead of half an hour."""
    values = DDPStrategy.__init__.__defaults__ or ()
    short = timedelta(seconds=SLEEP / 2)
    DDPStrategy.__init__.__defaults__ = tuple(short if isinstance(value, timedelta) else value for value in values)
    return main([*TRAINING, ANNOUNCE])


def finished_run(training: Forked, folder: Path) -> Path:
    """Wait for the training and return its run."""
    training.finish()
    run = run_in(folder / "lightning_logs")
    assert run is not None
    return run


@cache
def undisturbed(processes: int, folder: Path) -> Path:
    return finished_run(Forked(TRAINING, folder, folder / "log.txt", processes), folder)


def deviations(run: Path, processes: int, limit: float, folder: Path) -> list[str]:
    """Return the differences from an undisturbed run, and a training time above `limit`."""
    seconds = json.loads((run / "metrics.json").read_text())["train_seconds"]
    expected = undisturbed(processes, folder / f"undisturbed-{processes}")
    return differences(run, expected) + [f"train_seconds is {seconds}"] * (not 0 < seconds < limit)


def sleep_through(processes: int, phase: str, seconds: float, folder: str) -> list[str]:
    """Stop all processes of a training in a phase, continue them later, and return the deviations."""
    place = Path(folder)
    training = Forked(train_with_short_timeouts, place, place / "log.txt", processes)
    while training.count(phase) < 2:
        assert training.listen(1.0), training.log.read_text()[-2000:]
    training.send(signal.SIGSTOP)
    time.sleep(seconds)
    training.send(signal.SIGCONT)
    run = finished_run(training, place)
    return deviations(run, processes, time.monotonic() - training.started, place.parents[1])


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_machine_that_sleeps_longer_than_the_rank_timeout_loses_nothing(
    long_form: bool, forking: Callable[..., Any], tmp_path: Path
) -> None:
    for phase in ("training", "validation", "checkpoint: writing") if long_form else ("training",):
        seconds = size("SLEEP", 20) if long_form else SLEEP
        for processes in (1, 2) if long_form else (2,):
            folder = str(tmp_path / f"{phase}-{processes}")
            assert forking(sleep_through, processes=processes, phase=phase, seconds=seconds, folder=folder) == []


def jump(seconds: int, folder: str) -> list[str]:
    """Shift the time of day in the middle of a training, and return the deviations."""
    place = Path(folder)
    training = Forked([*TRAINING, JUMP], place, place / "log.txt", more={CLOCK: str(seconds)})
    return deviations(finished_run(training, place), 1, LIMIT, place.parent)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [DAY, -DAY])
def test_a_clock_that_jumps_by_a_day_changes_nothing(seconds: int, forking: Callable[..., Any], tmp_path: Path) -> None:
    assert forking(jump, seconds=seconds, folder=str(tmp_path)) == []
