"""One of two processes is lost: the run must end soon, name it, leave nothing, and go on as if nothing had been.

They are started by the Trainer, by torchrun, and on two machines (network namespaces, which take root).
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
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from stress.compare_runs import differences, finished, run_in
from stress.fault_hooks import CRASH, FOLDER, FREEZE, HANG, KILL
from stress.forked import SMALL_TRAINING, clean_environment, size
from stress.network_namespaces import TwoMachines, two_machines, why_not

from cifar_lit.distributed.join import free_port

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it reads /proc")

CUT = "network cut"
OWN, TORCHRUN, MACHINES = "--devices 2", "torchrun", "two machines"
FAULTS = {OWN: (CRASH, KILL, FREEZE, HANG), TORCHRUN: (CRASH, KILL, FREEZE), MACHINES: (CRASH, KILL, FREEZE, CUT)}
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

    def __init__(self, way: str, argv: list[str], folder: Path, machines: TwoMachines | None, **more: str) -> None:
        self.mark = uuid.uuid4().hex
        self.log = folder / "err.txt"
        own = {**clean_environment(), MARK: self.mark, **more}
        module = ["-m", "cifar_lit", *argv]
        commands: list[tuple[list[str], dict[str, str]]] = [([sys.executable, *module, "--devices", "2"], {})]
        if machines:
            meet = {"MASTER_ADDR": machines.address(0), "MASTER_PORT": str(free_port())}
            line = [sys.executable, *module, "--nodes", "2", "--devices", "1"]
            commands = [([*machines.within(node), *line], {**meet, "NODE_RANK": str(node)}) for node in (0, 1)]
        elif way == TORCHRUN:
            commands = [([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *module], {})]
        with self.log.open("a") as log:
            self.processes = [
                subprocess.Popen(line, cwd=folder, env={**own, **place}, stdout=log, stderr=log, start_new_session=True)
                for line, place in commands
            ]

    def codes(self, limit: float) -> list[int]:
        """The exit codes; raises AssertionError when the processes do not end in time."""
        deadline = time.monotonic() + limit
        try:
            return [process.wait(max(0.0, deadline - time.monotonic())) for process in self.processes]
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
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(10.0)
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
    """A training that meets a fault, and is gone on with: seconds to its end, exit codes, what it said, what was left.

    `missed`: in what the run that was gone on with differs from an undisturbed one.
    """
    signs = folder / "signs"
    signs.mkdir(parents=True)
    logs = folder / "lightning_logs"
    with two_machines() if case.way == MACHINES else nullcontext() as machines:
        training = Started(case.way, [*TRAINING, "--rank-timeout", str(limit)], folder, machines, **{FOLDER: str(signs)})
        deadline = time.monotonic() + START
        while not all((signs / f"ready-{rank}").exists() for rank in (0, 1)):
            if time.monotonic() > deadline or any(process.poll() is not None for process in training.processes):
                training.clear(0.0)
                raise AssertionError(f"a training did not begin: {training.log.read_text()[-2000:]}")
            time.sleep(0.02)
        started = time.monotonic()
        if case.fault == CUT:
            machines.unplug(case.rank)
        else:
            (signs / "new").write_text(case.fault)
            (signs / "new").rename(signs / f"fault-{case.rank}")
        codes = training.codes(2 * limit + START)
        seconds = time.monotonic() - started
        left = training.clear(AFTER)
        lines = [line for line in training.log.read_text().splitlines() if "cifar-lit: " in line]
        if case.fault == CUT:
            machines.plug(case.rank)
        again = Started(case.way, ["train", "--resume"], folder, machines)
        ended = again.codes(START)
        again.clear(AFTER)
        run = run_in(logs)
        missed = differences(run, expected) if run and finished(run) else [f"{ended}: {again.log.read_text()[-500:]}"]
    said = " | ".join(dict.fromkeys(lines))
    return {**case._asdict(), "seconds": round(seconds, 2), "codes": codes, "left": left, "said": said, "missed": missed}


@pytest.mark.stress
def test_a_run_that_loses_a_rank_ends_soon_names_it_leaves_nothing_and_goes_on(
    environment: dict[str, str], write_counts: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    limit = size("RANK_TIMEOUT", 60)
    whole = tmp_path / "whole"
    whole.mkdir()
    training = Started(OWN, TRAINING, whole, None)
    assert training.codes(START) == [0], training.log.read_text()[-2000:]
    expected = run_in(whole / "lightning_logs")
    assert expected is not None
    lacking = {MACHINES: why_not()}
    outcomes, skipped = [], []
    for number, case in enumerate(CASES[: size("LOST_RANKS", 99)]):
        if why := lacking.get(case.way):
            skipped.append(f"{', '.join(map(str, case))}: {why}")
            continue
        outcomes.append(carry_out(case, tmp_path / str(number), expected, limit))
        shutil.rmtree(tmp_path / str(number), ignore_errors=True)
    headline = {
        "slowest end of a run that lost a rank": max(one["seconds"] for one in outcomes),
        "processes left behind": sum(one["left"] for one in outcomes),
        "runs gone on with, identical to the last bit": sum(not one["missed"] for one in outcomes),
    }
    units = dict(zip(headline, ("s", "", f"of {len(outcomes)}"), strict=True))
    write_counts({"rank_timeout": limit, "cases": outcomes, "skipped": skipped, "headline": headline, "unit": units})
    assert [one for one in outcomes if one["left"] or one["missed"] or 0 in one["codes"]] == []
    for one in outcomes:
        if one["fault"] in (KILL, HANG, FREEZE) and one["way"] == OWN:
            assert f"rank {one['rank']} (process " in one["said"]
