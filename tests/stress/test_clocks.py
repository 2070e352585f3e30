"""A machine that sleeps in the middle of a training, and clocks that jump: it ends as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
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


def undisturbed(processes: int, folder: Path) -> Path:
    """A run that nothing happens to."""
    Forked(TRAINING, folder, folder.with_suffix(".txt"), processes).finish()
    run = run_in(folder / "lightning_logs")
    assert run is not None
    return run


def sleep_through(processes: int, phase: str, seconds: float, folder: str) -> dict[str, Any]:
    """A training whose processes are all stopped in a phase, and go on that much later: what is not as if nothing had been."""
    expected, place = undisturbed(processes, Path(folder) / "undisturbed"), Path(folder) / "asleep"
    training = Forked(lambda: impatient([*TRAINING, ANNOUNCE]), place, Path(folder) / "asleep.txt", processes)
    while training.count(phase) < 2:
        assert training.listen(1.0), training.log.read_text()[-2000:]
    training.send(signal.SIGSTOP)
    time.sleep(seconds)
    training.send(signal.SIGCONT)
    training.finish()
    run = run_in(place / "lightning_logs")
    assert run is not None
    took = json.loads((run / "metrics.json").read_text())["train_seconds"]
    return {"missed": differences(run, expected), "train_seconds": took, "seconds": time.monotonic() - training.started}


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_machine_that_sleeps_longer_than_a_process_may_be_silent_loses_nothing(
    processes: int, long_form: bool, forking: Callable[..., Any], tmp_path: Path
) -> None:
    for phase in ("training", "validation", "checkpoint: writing") if long_form else ("training",):
        seconds = size("SLEEP", 20) if long_form else SLEEP
        ended = forking(sleep_through, processes=processes, phase=phase, seconds=seconds, folder=str(tmp_path / phase))
        assert ended["missed"] == []
        assert 0 < ended["train_seconds"] < ended["seconds"]


def jump(seconds: int, processes: int, folder: str) -> list[str]:
    """In what a training differs from an undisturbed one in whose middle the time of day jumped."""
    expected, place = undisturbed(processes, Path(folder) / "undisturbed"), Path(folder) / "jumped"
    Forked([*TRAINING, JUMP], place, Path(folder) / "jumped.txt", processes, {CLOCK: str(seconds)}).finish()
    run = run_in(place / "lightning_logs")
    assert run is not None
    took = json.loads((run / "metrics.json").read_text())["train_seconds"]
    return differences(run, expected) + [f"train_seconds is {took}"] * (not 0 < took < LIMIT)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.stress)])
@pytest.mark.parametrize("seconds", [DAY, -DAY])
def test_a_clock_that_jumps_by_a_day_changes_nothing(
    seconds: int, processes: int, forking: Callable[..., Any], tmp_path: Path
) -> None:
    assert forking(jump, seconds=seconds, processes=processes, folder=str(tmp_path)) == []
