"""Ranks that watch each other, in processes of their own: all end soon when one is gone, and one line says why."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from started_ranks import LIMIT, ROOT, SOON, Rank, meet

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")

Ranks = list[Rank]


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Three, or as many as a test asks for, that have met, and hang as in a collective unless it says so."""
    count, hang = getattr(request, "param", (3, True))
    first = Rank(0, count)
    found = [first, *(Rank(number, count, *first.said) for number in range(1, count))]
    meet(first, count)
    if hang:
        for rank in found:
            rank.tell("hang")
    yield found
    for rank in found:
        with suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
        rank.process.communicate()


idle = pytest.mark.parametrize("ranks", [(2, False)], indirect=True)


def gone(pid: int, seconds: float = SOON) -> bool:
    """Whether a process ends within that time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_a_killed_rank_ends_the_others_and_the_first_names_it_with_the_command_to_go_on(ranks: Ranks) -> None:
    ranks[1].process.kill()
    code, said = ranks[0].wait()
    assert code == 1
    assert said.startswith(
        f"cifar-lit: rank 1 (process {ranks[1].pid} on {socket.gethostname()}) is gone: it crashed, or was killed."
    )
    assert said.endswith("The run was ended. Go on with:\n  cifar-lit train --resume a-run\n")
    assert ranks[0].released()
    assert ranks[2].wait() == (1, "")


def test_the_loss_of_the_first_rank_is_told_by_the_second_alone(ranks: Ranks) -> None:
    ranks[0].process.kill()
    code, said = ranks[1].wait()
    assert (code, said.count("\n")) == (1, 2)
    assert f"rank 0 (process {ranks[0].pid} on" in said
    assert ranks[2].wait() == (1, "")


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_rank_ends_the_run_at_the_limit_and_is_killed_by_its_guard(ranks: Ranks, frozen: int) -> None:
    started = time.monotonic()
    os.kill(ranks[frozen].pid, signal.SIGSTOP)
    code, said = ranks[1 - frozen].wait(LIMIT + SOON)
    assert time.monotonic() - started >= LIMIT - 1
    assert code == 1
    assert f"rank {frozen} (process {ranks[frozen].pid} on" in said
    assert "has given no sign for 2 s: it is frozen, or its machine cannot be reached" in said
    assert ranks[2].wait() == (1, "")
    assert ranks[frozen].wait(LIMIT + 2 + SOON)[0] == -signal.SIGKILL


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_watching_costs_next_to_nothing(ranks: Ranks) -> None:
    def computed() -> float:
        ticks = [Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2].split()[11:13] for rank in ranks]
        return sum(int(tick) for pair in ticks for tick in pair) / os.sysconf("SC_CLK_TCK")

    before = computed()
    time.sleep(2.0)
    assert computed() - before <= 0.1  # seconds of three processes, whose beats are more frequent here than a run's


def test_a_run_that_is_stopped_as_a_whole_and_goes_on_later_has_lost_nobody(ranks: Ranks) -> None:
    for rank in ranks:
        os.killpg(rank.pid, signal.SIGSTOP)
    time.sleep(2.5 * LIMIT)
    for rank in ranks:
        os.killpg(rank.pid, signal.SIGCONT)
    time.sleep(LIMIT / 2)
    assert [rank.wait() for rank in ranks if rank.process.poll() is not None] == []


@idle
def test_a_rank_whose_main_thread_hangs_while_the_others_wait_for_it_ends_the_run(ranks: Ranks) -> None:
    ranks[0].tell("at 1 0 0 7", "hang")
    ranks[1].tell("at 1 0 0 6", "hang")
    code, said = ranks[0].wait(2 * LIMIT + SOON)
    assert code == 1
    assert f"rank 1 (process {ranks[1].pid} on" in said
    assert "has kept the others waiting for 3 s: it hangs, in a file system, a driver or a deadlock" in said
    assert ranks[1].wait() == (1, "")  # its watch lives, and leaves it to the other one to tell


@idle
def test_ranks_that_are_long_at_the_same_place_or_move_do_not_hang(ranks: Ranks) -> None:
    for rank in ranks:
        rank.tell("at 1 0 1 0")
    time.sleep(3 * LIMIT)
    ranks[0].tell("at 1 0 2 0")  # it is done with its share of an evaluation first
    time.sleep(LIMIT)
    ranks[1].tell("at 1 0 2 0")
    time.sleep(1.0)
    for rank in ranks:
        rank.tell("end 0")
        assert rank.wait() == (0, "")


@idle
def test_a_rank_that_fails_says_why_and_the_others_end_without_a_word(ranks: Ranks) -> None:
    ranks[0].tell("hang")
    ranks[1].tell("end 1")
    assert ranks[1].wait() == (1, "[rank 1] cifar-lit: no more paper\n")
    assert ranks[0].wait() == (1, "")


@idle
def test_what_all_ranks_fail_with_is_said_once(ranks: Ranks) -> None:
    for rank in ranks:
        rank.tell("end 1")
    said = [rank.wait() for rank in ranks]
    assert [code for code, _ in said] == [1, 1]
    assert "".join(text for _, text in said).removeprefix("[rank 1] ") == "cifar-lit: no more paper\n"


@idle
def test_a_rank_that_ends_in_order_leaves_the_others_at_work(ranks: Ranks) -> None:
    ranks[1].tell("end 0")
    assert ranks[1].wait() == (0, "")
    time.sleep(1.0)
    assert ranks[0].process.poll() is None
    ranks[0].tell("end 0")
    assert ranks[0].wait() == (0, "")


@idle
def test_the_first_rank_may_end_in_order_before_the_others(ranks: Ranks) -> None:
    ranks[0].tell("end 0")
    assert ranks[0].wait() == (0, "")
    time.sleep(1.0)
    ranks[1].tell("end 0")
    assert ranks[1].wait() == (0, "")


@idle
def test_the_error_that_a_lost_rank_leads_to_becomes_the_line_about_that_rank(ranks: Ranks) -> None:
    ranks[1].process.kill()
    ranks[0].tell("lost")
    code, said = ranks[0].wait()
    assert code == 1
    assert "rank 1 (process" in said and "another process" not in said


@idle
def test_a_worker_that_a_rank_has_forked_does_not_hide_its_end(ranks: Ranks) -> None:
    ranks[0].tell("hang")
    ranks[1].tell("fork")
    time.sleep(0.3)
    ranks[1].process.kill()
    assert "rank 1 (process" in ranks[0].wait()[1]


@pytest.mark.parametrize("ranks", [(1, False)], indirect=True)
@pytest.mark.parametrize(
    ("end", "line"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 was killed by SIGKILL, as systems do that run out of memory"),
        ("os._exit(3)", "rank 1 ended with exit code 3"),
    ],
)
def test_a_rank_that_dies_before_it_has_joined_is_noticed_by_the_one_that_has_started_it(
    ranks: Ranks, end: str, line: str
) -> None:
    ranks[0].tell(f"launch {end}", "hang")
    code, said = ranks[0].wait()
    assert code == 1
    assert line in said


def test_a_rank_that_never_comes_ends_the_others_who_say_whom_they_miss() -> None:
    first = Rank(0, 3, limit=0.5)
    second = Rank(1, 3, *first.said, limit=0.5)
    for rank in (first, second):
        rank.tell("hang")
    code, said = first.wait(5 * 0.5 + SOON)
    assert code == 1
    assert "rank 2 has not come within 2 s" in said
    assert second.wait() == (1, "")
    for rank in (first, second):
        rank.process.communicate()


def test_a_stranger_on_the_port_is_not_let_in_and_ends_nothing() -> None:
    first = Rank(0, 2)
    port, token = first.said
    for text in (
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"token": "wrong", "rank": 1, "pid": 1, "host": "", "machine": ""}\n',
        b"[]\n",
        b"",
    ):
        with socket.create_connection(("127.0.0.1", int(port)), 5) as stranger:
            stranger.sendall(text)
            if text:
                assert stranger.recv(1) == b""
    second = Rank(1, 2, port, token)
    meet(first, 2)
    for rank in (first, second):
        rank.tell("end 0")
        assert rank.wait() == (0, "")
        rank.process.communicate()


PARENT = """
import subprocess, sys
def start(*more):
    return subprocess.Popen([sys.executable, sys.argv[1], *more, "--parent"], stdin=-1, stdout=-1, text=True)
first = start("0", "2", sys.argv[2])
second = start("1", "2", sys.argv[2], *first.stdout.readline().split())
second.stdout.readline()
for rank in (first, second):
    rank.stdin.write("hang\\n")
    rank.stdin.flush()
print(first.pid, second.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_ranks_end_with_the_torchrun_that_has_started_them_and_one_says_so() -> None:
    script = str(Path(__file__).with_name("one_rank.py"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-c", PARENT, script, str(LIMIT)]
    with subprocess.Popen(line, stdin=-1, stdout=-1, stderr=-1, text=True, env=environment) as agent:
        assert agent.stdout is not None and agent.stderr is not None
        pids = [int(pid) for pid in agent.stdout.readline().split()]
        time.sleep(0.5)  # until both know of each other
        agent.kill()
        assert all(gone(pid) for pid in pids)
        assert agent.stderr.read().count("has lost the torchrun that started it") == 1
