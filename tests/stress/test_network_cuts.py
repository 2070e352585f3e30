"""Network failures between two processes: short ones lose nothing; after a permanent one each rank names the other.

Each process is a fork in its own network namespace, which requires root.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from stress.compare_runs import differences, run_in
from stress.fault_hooks import HOLD
from stress.forked import NAMESPACE, SMALL_TRAINING, Forked, size
from stress.network_namespaces import TwoMachines, two_machines, why_not

from cifar_lit.distributed.join import free_port
from cifar_lit.distributed.rank_watch import JOIN_FACTOR

RANK_TIMEOUT = 6.0
CUT_SECONDS = 2.0
END = 60.0  # further seconds for a run to end on a busy machine
UNPLUGGED, SHUT = "unplugged", "shut down"  # packets are lost; the interface is down
ANNOUNCE = "--trainer.callbacks=stress.fault_hooks.Announce"
TRAINING = [*SMALL_TRAINING, ANNOUNCE, "--nodes", "2", "--devices", "1", "--rank-timeout", str(RANK_TIMEOUT)]


class Cut(NamedTuple):
    """A network failure."""

    how: str
    rank: int
    phase: str  # phase of rank 0 in which it happens
    times: int  # occurrence of that phase
    heals: bool  # after CUT_SECONDS


WRITING = "checkpoint: writing"
MOMENTS = (("start", 0), ("training", 3), ("validation", 2), (WRITING, 3), ("test", 1), ("writing results", 1))
CUTS = [
    Cut(how, rank, *moment, heals)
    for heals in (True, False)
    for moment, (how, rank) in product(MOMENTS, ((UNPLUGGED, 1), (SHUT, 0)))
]
SHORT = [Cut(UNPLUGGED, 1, "training", 3, heals=True), Cut(SHUT, 0, WRITING, 3, heals=False)]


def start(machines: TwoMachines, argv: list[str], folder: Path, hold: str = "") -> Forked:
    """Start a command on both machines."""
    shared = {"MASTER_ADDR": machines.address(0), "MASTER_PORT": str(free_port()), HOLD: hold}
    nodes = [{**shared, "NODE_RANK": str(node), NAMESPACE: name} for node, name in enumerate(machines.names)]
    return Forked(argv, folder, folder.with_name(folder.name + "-{rank}.txt"), nodes)


def carry_out(machines: TwoMachines, cut: Cut, folder: Path) -> tuple[Path | None, dict[str, Any]]:
    """Cut the network of a training and resume the run if it ended; return the run and the outcome."""
    sever, mend = (machines.unplug, machines.plug) if cut.how == UNPLUGGED else (machines.shut, machines.open)
    if cut.phase == "start":
        sever(cut.rank)
    training = start(machines, TRAINING, folder, f"{cut.times} {cut.phase}")
    while training.count(cut.phase) < cut.times:
        assert training.listen(1.0), training.log.read_text()
    if cut.phase != "start":
        sever(cut.rank)
    cut_time = time.monotonic()
    if cut.heals:
        time.sleep(CUT_SECONDS)
        mend(cut.rank)
    codes = training.wait(JOIN_FACTOR * RANK_TIMEOUT + END)
    seconds = round(time.monotonic() - cut_time, 2)
    if not cut.heals:
        mend(cut.rank)
    logs = [folder.with_name(f"{folder.name}-{rank}.txt").read_text() for rank in (0, 1)]
    messages = [[line for line in text.splitlines() if "cifar-lit: " in line] for text in logs]
    if any(codes):
        run = run_in(folder / "lightning_logs")
        started = run is not None and any((run / "checkpoints").glob("*.ckpt"))
        start(machines, ["train", "--resume"] if started else TRAINING, folder).finish()
    outcome = {**cut._asdict(), "seconds": seconds, "codes": codes, "messages": messages}
    return run_in(folder / "lightning_logs"), outcome


def cut_all(cuts: list[list[Any]], folder: str) -> list[dict[str, Any]]:
    """Return the outcome of each cut, with the differences from a run on an undisturbed network."""
    outcomes = []
    with two_machines() as machines:
        undisturbed = Path(folder) / "undisturbed"
        start(machines, TRAINING, undisturbed).finish()
        expected = run_in(undisturbed / "lightning_logs")
        assert expected is not None
        for number, values in enumerate(cuts):
            run, outcome = carry_out(machines, Cut(*values), Path(folder) / str(number))
            outcomes.append({**outcome, "differences": differences(run, expected) if run else ["no run"]})
    return outcomes


@pytest.mark.slow
def test_a_short_network_failure_loses_nothing_and_after_a_permanent_one_each_rank_names_the_other(
    long_form: bool, forking: Callable[..., Any], write_counts: Callable[..., None], tmp_path: Path
) -> None:
    """The long form takes STRESS_CUTS of all cuts from number STRESS_FIRST, to split them over several calls."""
    if why := why_not():
        pytest.skip(why)
    first = size("FIRST", 0)
    cuts = CUTS[first : first + size("CUTS", len(CUTS))] if long_form else SHORT
    outcomes = forking(cut_all, cuts=cuts, folder=str(tmp_path))
    permanent = [case for case in outcomes if not case["heals"]]
    headline = {
        "network failures": len(outcomes),
        "slowest end after a permanent failure, in s": max((case["seconds"] for case in permanent), default=0.0),
        "runs bit-identical, resumed where they ended": sum(not case["differences"] for case in outcomes),
    }
    write_counts({"rank_timeout": RANK_TIMEOUT, "cases": outcomes, "headline": headline, "unit": {}})
    assert [case for case in outcomes if case["differences"]] == []
    assert [case for case in outcomes if case["heals"] and any(case["codes"])] == []
    for case in permanent:
        if case["phase"] != "writing results":  # done by rank 0 alone, perhaps before the failure
            assert case["codes"] == [1, 1], case
            for rank, lines in enumerate(case["messages"]):
                assert len(lines) == 1 and f"rank {1 - rank} " in lines[0], case
