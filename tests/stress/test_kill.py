"""Trainings killed at random moments and resumed give the same files as undisturbed ones."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stress.compare_runs import differences, finished, run_in
from stress.forked import SMALL_TRAINING, Forked, size

KINDS = {
    "one process": (SMALL_TRAINING, 1),
    "images from workers": ([*SMALL_TRAINING, "--data.placement", "host", "--data.workers", "1"], 1),
    "two processes": (SMALL_TRAINING, 2),
}


def start(argv: list[str], processes: int, folder: Path) -> Forked:
    return Forked([*argv, "--devices", str(processes)], folder, folder.with_suffix(".log"), processes)


def kill_and_finish(kind: str, folder: str, kills: int, seed: int) -> int:
    """Kill a training at random moments, resume it, and compare it with an undisturbed one. Return the kills that hit.

    A kill may hit before the first checkpoint, and then the training starts again.
    """
    argv, processes = KINDS[kind]
    draw, place, undisturbed = random.Random(seed), Path(folder) / "killed", Path(folder) / "undisturbed"
    whole = start(argv, processes, undisturbed)
    whole.finish()
    seconds, hits = time.monotonic() - whole.started, 0
    run = None
    for number in range(kills + 1):
        is_resumed = run is not None and any(run.glob("checkpoints/*.ckpt"))
        attempt = start(["train", "--resume"] if is_resumed else argv, processes, place)
        if number == kills:
            attempt.finish()
        else:
            time.sleep(draw.uniform(0, seconds))
            attempt.send(draw.choice((signal.SIGTERM, signal.SIGKILL)))
            hits += any(attempt.wait())
        run = run_in(place / "lightning_logs")
        if run and finished(run):
            break
    assert run and differences(run, run_in(undisturbed / "lightning_logs") or Path()) == []
    shutil.rmtree(folder)
    return hits


@pytest.mark.stress
@pytest.mark.parametrize("kind", KINDS)
def test_killed_and_resumed_trainings_equal_undisturbed_ones(
    kind: str, forking: Callable[..., Any], tmp_path: Path
) -> None:
    """STRESS_SEED selects other moments, STRESS_RUNS the number of trainings."""
    first, hits = size("SEED", 0), 0
    for seed in range(first, first + size("RUNS", 5)):
        hits += forking(kill_and_finish, kind=kind, folder=str(tmp_path / str(seed)), kills=3, seed=seed)
    assert hits
