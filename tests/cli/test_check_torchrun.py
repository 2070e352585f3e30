"""`devices --check` in processes that torchrun has started: they form the group themselves, and the first one prints."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from command_line import Typed, typed

from cifar_lit.cli.check.torchrun import Board, Job

LIMIT = 200  # seconds in which torchrun must have ended
TORCHELASTIC = {
    "TORCHELASTIC_RUN_ID": "one", "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
}  # fmt: skip
# A command of which the process with rank 1 is never heard of, as if its machine had stopped.
STOPS = """
import os, time
if os.environ["RANK"] == "1":
    time.sleep(600)
from cifar_lit.cli import main
raise SystemExit(main(["devices", "--check", "--accelerator", "cpu", "--limit", "15"]))
"""


def torchrun(*words: str) -> Typed:
    """Runs torchrun; what is left of it at the end is killed."""
    line = [sys.executable, "-m", "torch.distributed.run", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=LIMIT)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return Typed(process.returncode, out, err)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_two_machines_check_their_own_devices_and_form_one_group() -> None:
    port = str(free_port())

    def node(number: int) -> Typed:
        place = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(number), "--master-addr", "127.0.0.1"]
        return torchrun(*place, "--master-port", port, "-m", "cifar_lit", "devices", "--check", "--accelerator", "cpu")

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(node, (0, 1))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in first.out.splitlines() if line.startswith("│")]
    assert {row[0] for row in rows} == {"machine 0: the CPU", "machine 1: the CPU", "two processes over gloo"}
    assert {row[2] for row in rows} == {"right"}
    assert "all is well" in first.out
    assert second.out == ""


def test_a_process_that_does_not_answer_is_named_by_its_number(here: Path) -> None:
    (here / "stops.py").write_text(STOPS)
    answer = torchrun("--standalone", "--nproc-per-node", "2", "stops.py")
    lines = [line for line in answer.err.splitlines() if line.startswith("cifar-lit:")]
    assert lines == ["cifar-lit: process 1 of 2 gave no answer in 15 s over gloo (starting)"]
    assert answer.code == 1


def test_torchrun_tells_who_is_who() -> None:
    assert Job.of({**TORCHELASTIC}) == Job(rank=2, size=4, local_rank=0, local_size=2, node=1)
    assert Job.of({"RANK": "1", "WORLD_SIZE": "2"}) is None


def test_what_is_posted_is_read_and_what_is_not_is_missing() -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    first, second = Board(Job(0, 2, 0, 2, 0), place, 5.0), Board(Job(1, 2, 1, 2, 0), place, 5.0)
    second.post("group", {"code": None})
    assert first.read("group", [1]) == {1: {"code": None}}
    first._limit = 0.2
    assert first.read("group", [0, 1]) == {0: None, 1: {"code": None}}


def test_flags_that_contradict_torchrun_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHELASTIC.items():
        monkeypatch.setenv(name, value)
    answer = typed("devices", "--check", "--devices", "3")
    assert answer.code == 2
    assert "--devices 3 contradicts torchrun, which started 2" in answer.err
