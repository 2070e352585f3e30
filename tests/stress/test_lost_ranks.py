"""One of two processes is lost: the run must end soon, name it, leave nothing, and go on as if nothing had been.

They are started by the Trainer and by torchrun; test_network_cuts.py has two machines.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from stress.compare_runs import differences, finished, run_in
from stress.fault_hooks import CRASH, FOLDER, FREEZE, HANG, KILL
from stress.forked import SMALL_TRAINING, clean_environment, size

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it reads /proc")

OWN, TORCHRUN = "--devices 2", "torchrun"
FAULTS = {OWN: (CRASH, KILL, FREEZE, HANG), TORCHRUN: (CRASH, KILL, FREEZE)}
TRAINING = [*SMALL_TRAINING, "--trainer.callbacks=stress.fault_hooks.Faults"]
START = 120.0  # seconds within which a training must be in its second epoch
MARK = "STRESS_RUN"  # in the environment of all that a case starts, to find what is left of it
AFTER = 5.0  # seconds after the end in which whatever is left may still go


class Case(NamedTuple):
    """way: how the two processes are started. fault, rank: what happens, and to which."""

    way: str
    fault: str
    rank: int


CASES = [Case(way, fault, rank) for way in FAULTS for fault in FAULTS[way] for rank in (1, 0)]


class Started:
    """A training in two processes, from the outside."""

    def __init__(self, way: str, argv: list[str], folder: Path, **more: str) -> None:
        self.mark = uuid.uuid4().hex
        self.log = folder / "err.txt"
        own = {**clean_environment(), MARK: self.mark, **more}
        module = ["-m", "cifar_lit", *argv]
        line = [sys.executable, *module, "--devices", "2"]
        if way == TORCHRUN:
            line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *module]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(line, cwd=folder, env=own, stdout=log, stderr=log, start_new_session=True)

    def code(self, limit: float) -> int:
        """The exit code; raises AssertionError when the training does not end in time."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.clear(0.0)
            raise AssertionError(f"no end within {limit:.0f} s: {self.log.read_text()[-2000:]}") from None

    def clear(self, seconds: float) -> int:
        """Waits that long for everything that was started to be gone, kills the rest and returns how many processes it was."""
        deadline = time.monotonic() + seconds
        while (left := marked(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10.0)
        return len(left)


def marked(mark: str) -> list[int]:
    """The processes with this mark in their environment that still run."""
    pids = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            alive = entry.name.isdecimal() and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
            if alive and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                pids.append(int(entry.name))
    return pids


def carry_out(case: Case, folder: Path, expected: Path, limit: float) -> dict[str, Any]:
    """A training that meets a fault, and is resumed: seconds to its end, exit code, what it said, what was left.

    `missed`: in what the resumed run differs from an undisturbed one.
    """
    signs = folder / "signs"
    signs.mkdir(parents=True)
    training = Started(case.way, [*TRAINING, "--rank-timeout", str(limit)], folder, **{FOLDER: str(signs)})
    deadline = time.monotonic() + START
    while not all((signs / f"ready-{rank}").exists() for rank in (0, 1)):
        if time.monotonic() > deadline or training.process.poll() is not None:
            training.clear(0.0)
            raise AssertionError(f"a training did not begin: {training.log.read_text()[-2000:]}")
        time.sleep(0.02)
    started = time.monotonic()
    (signs / "new").write_text(case.fault)
    (signs / "new").rename(signs / f"fault-{case.rank}")
    code = training.code(2 * limit + START)
    seconds = time.monotonic() - started
    left = training.clear(AFTER)
    said = " | ".join(dict.fromkeys(line for line in training.log.read_text().splitlines() if "cifar-lit: " in line))
    again = Started(case.way, ["train", "--resume"], folder)
    ended = again.code(START)
    again.clear(AFTER)
    run = run_in(folder / "lightning_logs")
    missed = differences(run, expected) if run and finished(run) else [f"{ended}: {again.log.read_text()[-500:]}"]
    return {**case._asdict(), "seconds": round(seconds, 2), "code": code, "left": left, "said": said, "missed": missed}


@pytest.mark.stress
def test_a_run_that_loses_a_rank_ends_soon_names_it_leaves_nothing_and_goes_on(
    environment: dict[str, str], write_counts: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    limit = size("RANK_TIMEOUT", 60)
    whole = tmp_path / "whole"
    whole.mkdir()
    training = Started(OWN, TRAINING, whole)
    assert training.code(START) == 0, training.log.read_text()[-2000:]
    expected = run_in(whole / "lightning_logs")
    assert expected is not None
    outcomes = []
    for number, case in enumerate(CASES[: size("LOST_RANKS", 99)]):
        outcomes.append(carry_out(case, tmp_path / str(number), expected, limit))
        shutil.rmtree(tmp_path / str(number), ignore_errors=True)
    headline = {
        "slowest end of a run that lost a rank": max(one["seconds"] for one in outcomes),
        "processes left behind": sum(one["left"] for one in outcomes),
        "runs gone on with, identical to the last bit": sum(not one["missed"] for one in outcomes),
    }
    units = dict(zip(headline, ("s", "", f"of {len(outcomes)}"), strict=True))
    write_counts({"rank_timeout": limit, "cases": outcomes, "headline": headline, "unit": units})
    assert [one for one in outcomes if one["left"] or one["missed"] or one["code"] == 0] == []
    for one in outcomes:
        if one["fault"] in (KILL, HANG, FREEZE) and one["way"] == OWN:
            assert f"rank {one['rank']} (process " in one["said"]
