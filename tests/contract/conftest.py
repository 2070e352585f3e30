"""Trainings shared by several tests."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path
from typing import NamedTuple

import pytest

from .command_line import RECIPE, SMALL, TIME_LIMIT, Answer, Started, Training, run_command


@pytest.fixture(autouse=True)
def in_working_folder(working_folder: Path) -> None:
    """Run every test of this folder in `working_folder`."""


@pytest.fixture(scope="session")
def same_run_again(training: Training, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder (read-only) of a training from the config.yaml of `training`."""
    folder = tmp_path_factory.mktemp("again")
    with chdir(folder):
        answer = run_command("--config", training.run_dir / "config.yaml")
    assert answer.code == 0, answer.err
    return folder / "lightning_logs/small-1"


class Interruption(NamedTuple):
    """A training stopped by Ctrl-C.

    Args:
        run_dir: its run folder (read-only).
        answer: its exit code and output.
        signal_time: time of the signal, in nanoseconds since 1970.
        while_running: the answer to a second process that tried to resume the run before the signal.
    """

    run_dir: Path
    answer: Answer
    signal_time: int
    while_running: Answer


STEPS = 170  # in the one epoch of the interrupted training


@pytest.fixture(scope="session")
def interruption(tmp_path_factory: pytest.TempPathFactory) -> Interruption:
    """`cifar-lit train`, stopped by Ctrl-C early in its epoch."""
    folder = tmp_path_factory.mktemp("interruption")
    (folder / "small.yaml").write_text(RECIPE)
    settings = "--data.count 1400 --batch-size 8 --epochs 1 --lr 0.001 --checkpoint-every 15"
    process = Started(["train", *SMALL, *settings.split()], folder, "interrupted")
    run_dir = folder / "lightning_logs/small-1"
    wait_for(run_dir / "checkpoints/last.ckpt", process)
    process.process.send_signal(signal.SIGSTOP)  # it keeps its lock but cannot finish
    with chdir(folder):
        while_running = run_command("--resume", run_dir)
    signal_time = time.time_ns()
    process.process.send_signal(signal.SIGINT)  # Ctrl-C
    process.process.send_signal(signal.SIGCONT)
    return Interruption(run_dir, process.answer(), signal_time, while_running)


def wait_for(path: Path, process: Started) -> None:
    """Wait until a running process has written a file."""
    deadline = time.monotonic() + TIME_LIMIT
    while not path.exists():
        assert process.process.poll() is None, process.err.read_text()
        assert time.monotonic() < deadline, f"no {path.name} after {TIME_LIMIT:.0f} s"
        time.sleep(0.01)


def start_pair(words: Sequence[object], folder: Path) -> list[Started]:
    """Start a command in two processes as torchrun does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"TORCHELASTIC_RUN_ID": "pair", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [Started(words, folder, f"rank{rank}", RANK=rank, LOCAL_RANK=rank, **common, **address) for rank in "01"]
