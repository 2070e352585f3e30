"""The network between two processes is cut: for a moment, and nothing is lost; for good, and each names the other and ends.

The processes are forks of one, each in a network namespace of its own, which takes root.
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
END = 60.0  # seconds beyond the stated ones in which a run must have ended on a busy machine
UNPLUGGED, SHUT = "unplugged", "shut down"  # nobody is told; the machine itself has no way any more
TRAINING = [
    *(*SMALL_TRAINING, "--trainer.callbacks=stress.fault_hooks.Announce", "--nodes", "2", "--devices", "1"),
    *("--rank-timeout", str(RANK_TIMEOUT)),
]


class Cut(NamedTuple):
    """how, rank: what is done to which machine. phase, times: when, as rank 0 says it. heals: after `CUT_SECONDS`, or never."""

    how: str
    rank: int
    phase: str
    times: int
    heals: bool


MOMENTS = (
    ("start", 0),
    ("training", 3),
    ("validation", 2),
    ("checkpoint: writing", 3),
    ("test", 1),
    ("writing results", 1),
)
CUTS = [
    Cut(how, rank, *moment, heals)
    for heals in (True, False)
    for moment, (how, rank) in product(MOMENTS, ((UNPLUGGED, 1), (SHUT, 0)))
]
SHORT = [Cut(UNPLUGGED, 1, "training", 3, heals=True), Cut(SHUT, 0, "checkpoint: writing", 3, heals=False)]


def start(machines: TwoMachines, line: list[str], folder: Path, hold: str = "") -> Forked:
    """A command on both machines."""
    meet = {"MASTER_ADDR": machines.address(0), "MASTER_PORT": str(free_port()), HOLD: hold}
    nodes = [{**meet, "NODE_RANK": str(node), NAMESPACE: name} for node, name in enumerate(machines.names)]
    return Forked(line, folder, folder.with_name(folder.name + "-{rank}.txt"), nodes)


def carry_out(machines: TwoMachines, cut: Cut, folder: Path) -> tuple[Path | None, dict[str, Any]]:
    """A training whose network is cut, and that is gone on with where it ended: the run; its end, and what each rank said."""
    sever, mend = (machines.unplug, machines.plug) if cut.how == UNPLUGGED else (machines.shut, machines.open)
    if cut.phase == "start":
        sever(cut.rank)
    training = start(machines, TRAINING, folder, f"{cut.times} {cut.phase}")
    while training.count(cut.phase) < cut.times:
        assert training.listen(1.0), training.log.read_text()
    if cut.phase != "start":
        sever(cut.rank)
    began = time.monotonic()
    if cut.heals:
        time.sleep(CUT_SECONDS)
        mend(cut.rank)
    codes = training.wait(JOIN_FACTOR * RANK_TIMEOUT + END)
    seconds = round(time.monotonic() - began, 2)
    if not cut.heals:
        mend(cut.rank)
    logs = [folder.with_name(f"{folder.name}-{rank}.txt").read_text() for rank in (0, 1)]
    said = [[line for line in text.splitlines() if "cifar-lit: " in line] for text in logs]
    if any(codes):
        run = run_in(folder / "lightning_logs")
        started = run is not None and any((run / "checkpoints").glob("*.ckpt"))
        start(machines, ["train", "--resume"] if started else TRAINING, folder).finish()
    return run_in(folder / "lightning_logs"), {**cut._asdict(), "seconds": seconds, "codes": codes, "said": said}


def cut_all(cuts: list[list[Any]], folder: str) -> list[dict[str, Any]]:
    """What each cut led to; `missed`: in what the run differs from one with an undisturbed network."""
    outcomes = []
    with two_machines() as machines:
        whole = Path(folder) / "whole"
        start(machines, TRAINING, whole).finish()
        expected = run_in(whole / "lightning_logs")
        assert expected is not None
        for number, values in enumerate(cuts):
            run, outcome = carry_out(machines, Cut(*values), Path(folder) / str(number))
            outcomes.append({**outcome, "missed": differences(run, expected) if run else ["it left no run"]})
    return outcomes


def test_a_short_cut_of_the_network_loses_nothing_and_a_lasting_one_ends_all_that_name_each_other(
    long_form: bool, forking: Callable[..., Any], write_counts: Callable[..., None], tmp_path: Path
) -> None:
    """The long form takes STRESS_CUTS of all cuts, from number STRESS_FIRST on, so that several calls add up."""
    if why := why_not():
        pytest.skip(why)
    first = size("FIRST", 0)
    cuts = CUTS[first : first + size("CUTS", len(CUTS))] if long_form else SHORT
    outcomes = forking(cut_all, cuts=cuts, folder=str(tmp_path))
    lasting = [one for one in outcomes if not one["heals"]]
    headline = {
        "cuts of the network": len(outcomes),
        "slowest end of a run that was cut for good, in s": max((one["seconds"] for one in lasting), default=0.0),
        "runs identical to the last bit, gone on with where they ended": sum(not one["missed"] for one in outcomes),
    }
    write_counts({"rank_timeout": RANK_TIMEOUT, "cases": outcomes, "headline": headline, "unit": {}})
    assert [one for one in outcomes if one["missed"]] == []
    assert [one for one in outcomes if one["heals"] and any(one["codes"])] == []
    for one in lasting:
        if one["phase"] != "writing results":  # which the first does alone, and may well have done by then
            assert one["codes"] == [1, 1], one
            assert all(len(said) == 1 and f"rank {1 - rank} " in said[0] for rank, said in enumerate(one["said"])), one
