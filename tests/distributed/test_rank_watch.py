"""Ranks watch each other: when one is lost, all end soon and one line gives the reason."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from rank_process import LIMIT, TIMEOUT, Rank, start_ranks
from torch.distributed import HashStore

from cifar_lit.cli.fit import RankProgress
from cifar_lit.distributed.rank_info import RankInfo
from cifar_lit.distributed.rank_watch import Fault, RankWatch, Row

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")


# ---- in separate processes


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[list[Rank]]:
    """Start three ranks that hang as in a collective, or `(world, command)` from the parameter."""
    ranks = start_ranks(*getattr(request, "param", (3, "hang")))
    yield ranks
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
        rank.process.communicate()


two_idle_ranks = pytest.mark.parametrize("ranks", [(2, "")], indirect=True)


@pytest.mark.parametrize(
    ("lost", "number", "reason"),
    [
        (0, signal.SIGKILL, "is gone: it was killed"),
        (1, signal.SIGKILL, "has sent no heartbeat for 2 s: it is dead or frozen, or its machine is unreachable"),
        (0, signal.SIGSTOP, "has sent no heartbeat for 2 s: it is dead or frozen, or its machine is unreachable"),
        (1, signal.SIGSTOP, "has sent no heartbeat for 2 s: it is dead or frozen, or its machine is unreachable"),
    ],
)
def test_a_killed_or_frozen_rank_ends_the_others_and_the_lowest_remaining_rank_names_it(
    ranks: list[Rank], lost: int, number: int, reason: str
) -> None:
    os.kill(ranks[lost].pid, number)
    name = f"rank {lost} (process {ranks[lost].pid} on {socket.gethostname()})"
    line = f"cifar-lit: {name} {reason}. The run was ended. Resume with:\n"
    assert ranks[1 - lost].wait() == (1, f"{line}  cifar-lit train --resume a-run\n")
    assert "released" in ranks[2].read()
    assert ranks[2].wait() == (1, "")


def test_a_frozen_rank_that_continues_ends_too(ranks: list[Rank]) -> None:
    os.kill(ranks[1].pid, signal.SIGSTOP)
    ranks[0].wait()
    os.kill(ranks[1].pid, signal.SIGCONT)
    assert ranks[1].wait()[0] == 1


def test_a_run_that_is_suspended_and_continued_as_a_whole_loses_no_rank(ranks: list[Rank]) -> None:
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for rank in ranks:
            os.kill(rank.pid, number)
        time.sleep(LIMIT + 2.5 if number == signal.SIGSTOP else 2 * LIMIT)
    assert [rank.wait() for rank in ranks if rank.process.poll() is not None] == []


@two_idle_ranks
@pytest.mark.parametrize("both", [False, True])
def test_the_error_of_failing_ranks_is_printed_once(ranks: list[Rank], both: bool) -> None:
    ranks[0].write("end" if both else "hang")
    ranks[1].write("end")
    results = [rank.wait() for rank in ranks]
    assert [code for code, _ in results] == [1, 1]
    assert "".join(line for _, line in results).removeprefix("[rank 1] ") == "cifar-lit: no more paper\n"


@two_idle_ranks
def test_the_line_about_a_lost_rank_replaces_the_error_it_causes(ranks: list[Rank]) -> None:
    ranks[1].process.kill()
    ranks[0].write("lost")
    code, line = ranks[0].wait()
    assert code == 1
    assert "rank 1 (process" in line and "no more paper" not in line


@two_idle_ranks
@pytest.mark.parametrize("first_to_end", [0, 1])
def test_either_rank_may_finish_before_the_other(ranks: list[Rank], first_to_end: int) -> None:
    ranks[first_to_end].write("finish")
    time.sleep(2 * LIMIT)  # the first rank waits for the other, because it serves the store
    ranks[1 - first_to_end].write("finish")
    assert [rank.wait() for rank in ranks] == [(0, "")] * 2


@two_idle_ranks
def test_a_rank_whose_main_thread_hangs_is_named(ranks: list[Rank]) -> None:
    ranks[0].write("move")
    code, line = ranks[0].wait()
    assert code == 1 and f"rank 1 (process {ranks[1].pid} on" in line
    assert "has kept the others waiting for 3 s: it hangs in a file system, a driver or a deadlock" in line
    assert ranks[1].wait() == (1, "")


# ---- in this process, with simulated clocks and tables


class Table:
    """The watch of rank 0 of three ranks, and the positions of the ranks that have connected."""

    def __init__(self) -> None:
        self.watch = RankWatch(RankInfo(0, 3), 2.0, HashStore())
        self.rows: dict[int, Row] = {}

    def look(self, seconds: float, *positions: int) -> Fault | None:
        """Return the fault after these seconds, in which all connected ranks have sent heartbeats."""
        self.watch.now += seconds
        self.watch.answered = self.watch.now
        before, beats = self.rows, int(10 * self.watch.now)
        self.rows = {rank: Row(beats, [position], "host", rank, False) for rank, position in enumerate(positions)}
        return self.watch.look(before, self.rows)


def test_a_rank_is_stuck_only_if_it_stays_behind_the_others_without_progress() -> None:
    table = Table()
    for positions in ((0, 0, 0), (1, 0, 0), (1, 1, 1), (3, 2, 3), (4, 3, 4), (4, 4, 4)):
        for _ in range(1 if len(set(positions)) > 1 else 4):
            assert table.look(2.0, *positions) is None
    faults = [table.look(2.0, 5, 4, 5) for _ in range(2)]
    assert faults[0] is None and faults[1] is not None and faults[1].rank == 1


def test_ranks_that_never_connect_are_named() -> None:
    table = Table()
    assert table.look(0.0, 1) is None and table.look(9.0, 1) is None
    assert table.look(2.0, 1) == Fault(1, "lost", "did not connect within 10 s")


KILLED = "was killed by SIGKILL, perhaps because memory ran out"


@pytest.mark.parametrize(("command", "reason"), [("kill -9 $$", KILLED), ("exit 3", "ended with exit code 3")])
def test_the_parent_reports_a_rank_that_dies_before_it_joins(command: str, reason: str) -> None:
    table = Table()
    table.watch.adopt([subprocess.Popen(["sh", "-c", command])])
    deadline = time.monotonic() + TIMEOUT
    while (fault := table.look(0.1, 1)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert fault == Fault(1, "lost", reason)


def test_the_position_of_a_rank_grows_with_each_step_validation_and_stage() -> None:
    watch, trainer = SimpleNamespace(position=[]), SimpleNamespace(current_epoch=0)
    progress, positions = RankProgress(watch), []  # type: ignore[arg-type]

    def move(hook: str, *values: Any) -> None:
        getattr(progress, hook)(trainer, None, *values)
        positions.append(watch.position)

    move("setup", "fit")
    for trainer.current_epoch in range(2):
        for step in range(4):
            move("on_train_batch_start", None, step)
            if step in (1, 3):
                move("on_validation_epoch_start")
                move("on_validation_epoch_end")
    move("setup", "test")
    move("on_test_epoch_start")
    assert positions == sorted(positions) and len({tuple(position) for position in positions}) == len(positions)
