"""A run that loses one of two ranks ends soon, names it, leaves no process and can be resumed.

The Trainer or torchrun starts the ranks. For ranks on two machines see test_network_cuts.py.
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

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

OWN, TORCHRUN = "--devices 2", "torchrun"
FAULTS = {OWN: (CRASH, KILL, FREEZE, HANG), TORCHRUN: (CRASH, KILL, FREEZE)}
TRAINING = [*SMALL_TRAINING, "--trainer.callbacks=stress.fault_hooks.Faults"]
START = 120.0  # seconds for a training to reach its second epoch
MARK = "STRESS_RUN"  # variable that identifies all processes of a case
AFTER = 5.0  # seconds for remaining processes to end


class Case(NamedTuple):
    """A fault of one rank under a launcher."""

    way: str
    fault: str
    rank: int


CASES = [Case(way, fault, rank) for way in FAULTS for fault in FAULTS[way] for rank in (1, 0)]


class Training:
    """A training in two processes."""

    def __init__(self, way: str, argv: list[str], folder: Path, **variables: str) -> None:
        self.mark = uuid.uuid4().hex
        self.log = folder / "err.txt"
        env = {**clean_environment(), MARK: self.mark, **variables}
        module = ["-m", "cifar_lit", *argv]
        line = [sys.executable, *module, "--devices", "2"]
        if way == TORCHRUN:
            line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *module]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(line, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)

    def code(self, limit: float) -> int:
        """Return the exit code. Raise AssertionError if the training does not end in time."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.clear(0.0)
            raise AssertionError(f"no end within {limit:.0f} s: {self.log.read_text()[-2000:]}") from None

    def clear(self, seconds: float) -> int:
        """Wait up to `seconds` for all processes to end, kill the remaining ones and return their number."""
        deadline = time.monotonic() + seconds
        while (pids := live_processes(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10.0)
        return len(pids)


def live_processes(mark: str) -> list[int]:
    """Return the running processes with this mark in their environment."""
    pids = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            alive = entry.name.isdecimal() and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
            if alive and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                pids.append(int(entry.name))
    return pids


def carry_out(case: Case, folder: Path, expected: Path, limit: float) -> dict[str, Any]:
    """Inject a fault into a training, resume the run, and return the outcome of both."""
    signals = folder / "signals"
    signals.mkdir(parents=True)
    training = Training(case.way, [*TRAINING, "--rank-timeout", str(limit)], folder, **{FOLDER: str(signals)})
    deadline = time.monotonic() + START
    while not all((signals / f"ready-{rank}").exists() for rank in (0, 1)):
        if time.monotonic() > deadline or training.process.poll() is not None:
            training.clear(0.0)
            raise AssertionError(f"a training did not start: {training.log.read_text()[-2000:]}")
        time.sleep(0.02)
    fault_time = time.monotonic()
    (signals / "new").write_text(case.fault)
    (signals / "new").rename(signals / f"fault-{case.rank}")
    outcome = {**case._asdict(), "code": training.code(2 * limit + START)}
    outcome["seconds"] = round(time.monotonic() - fault_time, 2)
    outcome["left"] = training.clear(AFTER)
    lines = [line for line in training.log.read_text().splitlines() if "cifar-lit: " in line]
    stacks = "".join(path.read_text() for path in folder.glob(f"lightning_logs/*/stacks-rank-{case.rank}.txt"))
    outcome["stacks"] = [text.count("fault_hooks.py") for text in (stacks, training.log.read_text())]
    outcome["messages"] = " | ".join(dict.fromkeys(lines))
    resumed = Training(case.way, ["train", "--resume"], folder)
    code = resumed.code(START)
    resumed.clear(AFTER)
    run = run_in(folder / "lightning_logs")
    failure = [f"exit code {code}: {resumed.log.read_text()[-500:]}"]
    return {**outcome, "differences": differences(run, expected) if run and finished(run) else failure}


@pytest.mark.stress
def test_a_run_that_loses_a_rank_ends_soon_names_it_leaves_no_process_and_can_be_resumed(
    environment: dict[str, str], write_counts: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    limit = size("RANK_TIMEOUT", 60)
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    training = Training(OWN, TRAINING, undisturbed)
    assert training.code(START) == 0, training.log.read_text()[-2000:]
    expected = run_in(undisturbed / "lightning_logs")
    assert expected is not None
    outcomes = []
    for number, case in enumerate(CASES[: size("LOST_RANKS", 99)]):
        outcomes.append(carry_out(case, tmp_path / str(number), expected, limit))
        shutil.rmtree(tmp_path / str(number), ignore_errors=True)
    headline = {
        "slowest end of a run that lost a rank": max(outcome["seconds"] for outcome in outcomes),
        "processes left behind": sum(outcome["left"] for outcome in outcomes),
        "resumed runs, identical to the last bit": sum(not outcome["differences"] for outcome in outcomes),
    }
    units = dict(zip(headline, ("s", "", f"of {len(outcomes)}"), strict=True))
    write_counts({"rank_timeout": limit, "cases": outcomes, "headline": headline, "unit": units})
    assert [case for case in outcomes if case["left"] or case["differences"] or case["code"] == 0] == []
    for case in outcomes:
        if case["fault"] in (KILL, HANG, FREEZE) and case["way"] == OWN:
            assert f"rank {case['rank']} (process " in case["messages"]
        assert case["stacks"] == ([1, 1] if case["fault"] == HANG else [0, 0])
