"""Ranks watch each other: when one is lost, all end soon and one line gives the reason."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from rank_process import ENVIRONMENT, LIMIT, TIMEOUT, Rank, start_ranks

from cifar_lit.cli.fit import RankProgress
from cifar_lit.distributed import rank_watch
from cifar_lit.distributed.rank_info import RankInfo
from cifar_lit.distributed.rank_watch import Coordinator, Fault, RankWatch, Worker

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


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_rank_ends_the_others_and_the_lowest_remaining_rank_names_it(ranks: list[Rank], lost: int) -> None:
    ranks[lost].process.kill()
    name = f"rank {lost} (process {ranks[lost].pid} on {socket.gethostname()})"
    line = f"cifar-lit: {name} is gone: it crashed, or was killed. The run was ended. Resume with:\n"
    assert ranks[1 - lost].wait() == (1, f"{line}  cifar-lit train --resume a-run\n")
    assert "released" in ranks[2].read()
    assert ranks[2].wait() == (1, "")


@pytest.mark.slow
@two_idle_ranks
@pytest.mark.parametrize("stuck", [0, 1])
def test_a_rank_that_hangs_writes_its_stacks_before_it_is_ended(ranks: list[Rank], stuck: int, tmp_path: Path) -> None:
    ranks[stuck].write(f"hang in {tmp_path}")
    ranks[1 - stuck].write("ahead")
    code, text = ranks[stuck].wait()
    name = f"rank {stuck} (process {ranks[stuck].pid} on {socket.gethostname()})"
    first, _, stacks = text.partition("\n")
    assert (code, first) == (1, f"cifar-lit: {name} hangs. Its threads:")
    written = (tmp_path / f"stacks-rank-{stuck}.txt").read_text()
    for each in (stacks, written):
        assert "in read_a_lost_file_system\n" in each and "in write_stacks\n" in each
    other = ranks[1 - stuck].wait()[1]
    assert f"cifar-lit: {name} has kept the others waiting for 3 s" in other and "most recent call" not in other
    assert [path.name for path in tmp_path.iterdir()] == [f"stacks-rank-{stuck}.txt"]


@pytest.mark.slow
@two_idle_ranks
def test_a_rank_that_keeps_pythons_lock_writes_its_stacks_before_its_watchdog_kills_it(ranks: list[Rank]) -> None:
    while not psutil.Process(ranks[1].pid).children():  # its watchdog
        time.sleep(0.02)
    ranks[1].write("keep the lock")
    code, text = ranks[1].wait()
    assert code == -signal.SIGKILL
    assert "in wait_in_c\n" in text and "rank_watch.py" in text


@pytest.mark.slow
def test_a_run_that_is_suspended_and_continued_as_a_whole_loses_no_rank(ranks: list[Rank]) -> None:
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for rank in ranks:
            os.killpg(rank.pid, number)  # with its watchdog, which kills a rank that is stopped alone after LIMIT + 2 s
        time.sleep(LIMIT + 2.5 if number == signal.SIGSTOP else LIMIT / 2)
    assert [rank.wait() for rank in ranks if rank.process.poll() is not None] == []


@pytest.mark.slow
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
    ranks[1].write("fork")  # an orphaned child, such as a data worker, does not hide the loss
    ranks[1].write("members")
    ranks[1].read()
    ranks[1].process.kill()
    ranks[0].write("lost")
    code, line = ranks[0].wait()
    assert code == 1
    assert "rank 1 (process" in line and "no more paper" not in line


AGENT = """
import sys, rank_process
for rank in rank_process.start_ranks(2, "hang", "--parent"):
    print(rank.process.stderr.fileno(), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_ranks_end_with_their_torchrun_and_one_reports_it() -> None:
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}:{Path(__file__).parent}"}
    with subprocess.Popen([sys.executable, "-c", AGENT], stdin=-1, stdout=-1, text=True, env=environment) as torchrun:
        assert torchrun.stdout is not None
        paths = [f"/proc/{torchrun.pid}/fd/{torchrun.stdout.readline().strip()}" for _ in range(2)]
        pipes = [os.open(path, os.O_RDONLY) for path in paths]
        torchrun.kill()
    errors = ""
    for pipe in pipes:
        with os.fdopen(pipe) as stderr:
            errors += stderr.read()  # until the rank ends
    assert errors.count("has lost the torchrun that started it") == 1


# ---- in this process, step by step, with simulated clocks


class Pair:
    """The watches of two connected ranks, advanced by hand."""

    def __init__(self) -> None:
        self.first = Coordinator(RankInfo(0, 2, per_node=1), 1.0, "token")
        connection = socket.create_connection(("127.0.0.1", self.first.port), 5)
        self.second = Worker(RankInfo(1, 2), 1.0, connection, self.first.token)
        while 0 not in self.second.members or 1 not in self.second.members:
            assert self.look() == (None, None)

    def look(self, seconds: float = 0.0) -> tuple[Fault | None, Fault | None]:
        """Advance both clocks by `seconds`, exchange heartbeats, and return the fault that each rank sees."""
        for watch in (self.first, self.second):
            watch.now += seconds
            watch._last_heartbeat = -1.0
        second = self.second._look() or self.second._look()
        return self.first._look() or self.first._look(), second


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    for watch in (pair.first, pair.second):
        watch.close_in_fork()


def wait_for_fault(watch: RankWatch) -> Fault:
    deadline = time.monotonic() + TIMEOUT
    while (fault := watch._look()) is None:
        assert time.monotonic() < deadline
    return fault


def test_a_rank_that_slept_does_not_report_the_others_as_silent(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monotonic = time.monotonic
    monkeypatch.setattr(rank_watch.time, "monotonic", lambda: monotonic() + 1000)
    assert (pair.first._look(), pair.second._look()) == (None, None)


@pytest.mark.slow
def test_a_rank_is_stuck_only_if_it_stays_behind_the_others_without_progress(pair: Pair) -> None:
    for first, second in ((0, 0), (1, 0), (1, 1), (2, 1), (2, 2)):
        pair.first.position, pair.second.position = [1, 0, first, 0], [1, 0, second, 0]
        for _ in range(1 if first != second else 4):
            assert pair.look(0.7) == (None, None)
    pair.first.position = [1, 0, 2, 1]
    faults = [pair.look(0.7)[0] for _ in range(4)]
    assert faults[0] is None
    reason = "has kept the others waiting for 2 s: it hangs in a file system, a driver or a deadlock"
    assert faults[-1] == Fault(1, "stuck", reason)


def test_the_position_of_a_rank_grows_with_each_step_validation_and_stage() -> None:
    watch, folder = SimpleNamespace(position=[], folder=None), SimpleNamespace(path=Path("a-run"))
    trainer = SimpleNamespace(current_epoch=0, fast_dev_run=True)
    progress, positions = RankProgress(watch, folder), []  # type: ignore[arg-type]

    def move(hook: str, *values: Any) -> None:
        getattr(progress, hook)(trainer, None, *values)
        positions.append(watch.position)

    move("setup", "fit")
    assert watch.folder is None  # a fast_dev_run has no run folder
    trainer.fast_dev_run = False
    for trainer.current_epoch in range(2):
        for step in range(4):
            move("on_train_batch_start", None, step)
            if step in (1, 3):
                move("on_validation_epoch_start")
                move("on_validation_epoch_end")
    move("setup", "test")
    move("on_test_epoch_start")
    assert positions == sorted(positions) and len({tuple(position) for position in positions}) == len(positions)
    assert watch.folder == folder.path


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_either_rank_may_finish_before_the_other(pair: Pair, first_to_end: int) -> None:
    watches = (pair.first, pair.second)
    watches[first_to_end].finish()
    for connection in watches[first_to_end].connections.values():
        connection.socket.close()
    assert [watches[1 - first_to_end]._look() for _ in range(3)] == [None] * 3


KILLED = "was killed by SIGKILL, perhaps because memory ran out"


@pytest.mark.parametrize(("command", "reason"), [("kill -9 $$", KILLED), ("exit 3", "ended with exit code 3")])
def test_the_parent_reports_a_rank_that_dies_before_it_joins(pair: Pair, command: str, reason: str) -> None:
    pair.second.adopt([subprocess.Popen(["sh", "-c", command])])
    fault = wait_for_fault(pair.second)
    assert fault == Fault(2, "gone", reason)
    pair.second._settle(fault)
    assert wait_for_fault(pair.first) == fault


def test_ranks_that_never_connect_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    alone = Coordinator(RankInfo(0, 3, per_node=1), 10.0, "token")
    for seconds in (14.0, 2.0):
        assert capsys.readouterr().err == ""
        alone.now += seconds
        assert alone._look() is None
    assert capsys.readouterr().err == "waiting for rank 1, 2 of 3\n"
    alone.now += 50.0
    assert wait_for_fault(alone) == Fault(1, "silent", "did not connect within 50 s")
    alone.close_in_fork()


WRONG = b'{"token": "wrong", "rank": 1, "name": "", "machine": ""}\n'
SECOND_RANK_1 = WRONG.replace(b"wrong", b"token")


@pytest.mark.slow
@pytest.mark.parametrize("text", [b"GET / HTTP/1.1\r\n\r\n", WRONG, SECOND_RANK_1, b"half"])
def test_a_stranger_on_the_port_is_rejected_and_ends_nothing(pair: Pair, text: bytes) -> None:
    with socket.create_connection(("127.0.0.1", pair.first.port), 5) as stranger:
        stranger.sendall(text)
        for _ in range(3):
            assert pair.look() == (None, None)
        if text.endswith(b"\n"):
            assert stranger.recv(1) == b""
    assert pair.look() == (None, None)
    assert sorted(pair.first.members) == [0, 1]
