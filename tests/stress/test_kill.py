"""Trainings killed at random moments and resumed give the same result as undisturbed ones."""

from __future__ import annotations

import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from stress.compare_runs import differences, finished, run_in
from stress.forked import SMALL_TRAINING, Forked, size

ROUNDING = 1e-5  # tolerance of floats; weights under SGD differ by 6e-8, and losses are written with six digits
PATIENCE = 10.0  # seconds for all processes to end
NINE, TERM, ONE_OF_TWO = "kill -9", "SIGTERM", "kill -9 of one of two"


class Kind(NamedTuple):
    """A kind of training."""

    argv: list[str]
    processes: int = 1
    resumed_in: int = 0  # processes after a kill; 0 for the same number


# SGD instead of the recipe's AdamW where sums are rounded differently: AdamW scales up the smallest gradients.
SGD = ["--data.count", "118", "--model.optimizer", "sgd", "--lr", "0.05", "--model.optimizer_options.momentum", "0.9"]
WORKERS = "--data.placement host --data.workers 1"
SMALL_NET = {
    "one process": Kind(SMALL_TRAINING),
    "one process, images from workers": Kind([*SMALL_TRAINING, *WORKERS.split()]),
    "two processes": Kind(SMALL_TRAINING, processes=2),
    "two processes, resumed in one": Kind([*SMALL_TRAINING, *SGD], processes=2, resumed_in=1),
    "one process, resumed in two": Kind([*SMALL_TRAINING, *SGD], processes=1, resumed_in=2),
}


class Plan(NamedTuple):
    """Kill all processes, or the one with the given rank, `seconds` after the start."""

    how: str
    rank: int | None
    seconds: float


def draw_plan(draw: random.Random, seconds: float, processes: int) -> Plan:
    """Draw a plan for a training that takes `seconds`."""
    how = draw.choices((NINE, TERM, ONE_OF_TWO), (6, 3, 3 if processes > 1 else 0))[0]
    rank = draw.randrange(processes) if how == ONE_OF_TWO else None
    return Plan(how, rank, draw.uniform(0.0, seconds))


def carry_out(attempt: Forked, plan: Plan) -> bool:
    """Return whether the kill hit before the training had ended."""
    while attempt.running and time.monotonic() < attempt.started + plan.seconds:
        time.sleep(0.002)
    if not attempt.running:
        return False
    attempt.send(signal.SIGTERM if plan.how == TERM else signal.SIGKILL, plan.rank)
    deadline = time.monotonic() + PATIENCE
    while attempt.running and time.monotonic() < deadline:
        time.sleep(0.005)
    attempt.end()  # like torchrun, because a process may wait for another that has ended
    return any(attempt.codes.values())


def kill_one(kind: Kind, kills: int, seconds: float, draw: random.Random, folder: Path) -> tuple[list[Plan], Path]:
    """Kill a training up to `kills` times, then let it finish; return the kills that hit, and the run."""
    hits: list[Plan] = []
    for number in range(2 * kills + 1):
        run = run_in(folder / "lightning_logs")
        if run is not None and finished(run):
            return hits, run
        resumed = run is not None and any((run / "checkpoints").glob("*.ckpt"))
        processes = kind.resumed_in if resumed and kind.resumed_in else kind.processes
        argv = ["train", "--resume"] if resumed else kind.argv
        attempt = Forked([*argv, "--devices", str(processes)], folder, folder / "log.txt", processes)
        plan = draw_plan(draw, seconds, processes) if len(hits) < kills and number < 2 * kills else None
        if plan is None:
            attempt.finish()
        elif carry_out(attempt, plan):
            hits.append(plan)
            # Killed processes have the signal's code, stopped ones also 143; the other of two ends with 1.
            assert {*attempt.codes.values()} <= {-9, -15, 143, 1, 0}, attempt.log.read_text()[-800:]
    run = run_in(folder / "lightning_logs")
    assert run is not None and finished(run), f"not finished: {attempt.log.read_text()[-500:]}"
    return hits, run


def undisturbed(kind: Kind, folder: Path) -> tuple[Path, float]:
    """Return an undisturbed run and its duration in seconds."""
    attempt = Forked(kind.argv, folder, folder.with_suffix(".txt"), kind.processes)
    attempt.finish()
    run = run_in(folder / "lightning_logs")
    assert run is not None
    return run, time.monotonic() - attempt.started


def kill_trainings(kills: int, seconds: int, seed: int, folder: str) -> int:
    """Kill trainings, each up to three times, until `kills` have hit or `seconds` have passed; return how many hit."""
    draw, start = random.Random(seed), time.monotonic()
    expected_run = cache(lambda name: undisturbed(SMALL_NET[name], Path(folder) / "undisturbed" / name))
    hits: list[Plan] = []
    survivors = 0
    while len(hits) < kills and time.monotonic() < start + seconds:
        name = list(SMALL_NET)[(seed + survivors) % len(SMALL_NET)]
        kind, place = SMALL_NET[name], Path(folder) / f"run-{survivors}"
        expected, duration = expected_run(name)
        new, run = kill_one(kind, min(draw.randint(1, 3), kills - len(hits)), duration, draw, place)
        if places := differences(run, expected, ROUNDING if kind.resumed_in else 0.0):
            copy = shutil.copytree(place, tempfile.mkdtemp(prefix="cifar-lit-differs-"), dirs_exist_ok=True)
            raise AssertionError(f"{name}, killed in {new}: differs in {places[:5]}. The run is kept in {copy}.")
        survivors += 1
        hits += new
        shutil.rmtree(place)
    return len(hits)


@pytest.mark.stress
def test_killed_and_resumed_trainings_equal_undisturbed_ones(forking: Callable[..., Any], tmp_path: Path) -> None:
    """STRESS_SEED selects other moments, to split a long test over several calls of STRESS_SECONDS each."""
    sizes = {"kills": size("KILLS", 100), "seconds": size("SECONDS", 720), "seed": size("SEED", 0)}
    assert forking(kill_trainings, folder=str(tmp_path), **sizes) > 0
