"""Trainings that several tests look at, each made once."""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from .command_line import RECIPE, SMALL, TIME_LIMIT, Answer, Fork, Process, run_command


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with the recipe small.yaml."""
    (tmp_path / "small.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Training(NamedTuple):
    """A training with its test: the run folder, to be left as it is, and what was printed."""

    run_dir: Path
    answer: Answer


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A training by the recipe small.yaml, in one process on the CPU."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "small.yaml").write_text(RECIPE)
    with chdir(folder):
        answer = run_command(*SMALL)
    assert answer.code == 0, answer.err
    return Training(folder / "lightning_logs/small-1", answer)


@pytest.fixture(scope="session")
def run_dir(training: Training) -> Path:
    """The run folder of the training; to be left as it is."""
    return training.run_dir


@pytest.fixture(scope="session")
def same_run_again(training: Training, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a training from the config.yaml of the first; to be left as it is."""
    folder = tmp_path_factory.mktemp("again")
    with chdir(folder):
        answer = run_command("--config", training.run_dir / "config.yaml")
    assert answer.code == 0, answer.err
    return folder / "lightning_logs/small-1"


class Interruption(NamedTuple):
    """A training that was stopped by Ctrl-C.

    run_dir: its run folder, to be left as it is.
    answer: how it ended.
    signal_time: when the signal was sent, in nanoseconds since 1970.
    while_running: what a second process got that wanted to resume the run before the signal.
    """

    run_dir: Path
    answer: Answer
    signal_time: int
    while_running: Answer


STEPS = 170  # of the interrupted training, all in its only epoch


@pytest.fixture(scope="session")
def interruption(tmp_path_factory: pytest.TempPathFactory) -> Interruption:
    """`cifar-lit train` in a process of its own, stopped by Ctrl-C early in its epoch."""
    folder = tmp_path_factory.mktemp("interruption")
    (folder / "small.yaml").write_text(RECIPE)
    settings = ["--data.count", "1400", "--batch-size", "8", "--epochs", "1", "--lr", "0.001", "--checkpoint-every", "15"]
    process = Process([sys.executable, "-m", "cifar_lit", "train", *SMALL, *settings], folder)
    run_dir = folder / "lightning_logs/small-1"
    try:
        wait_for(run_dir / "checkpoints/last.ckpt", process)
        process.send(signal.SIGSTOP)  # it still holds its run, but cannot come to its end meanwhile
        with chdir(folder):
            while_running = run_command("--resume", run_dir)
        signal_time = time.time_ns()
        process.send(signal.SIGINT)  # Ctrl-C
        process.send(signal.SIGCONT)
        return Interruption(run_dir, process.answer(), signal_time, while_running)
    finally:
        process.kill()


def wait_for(path: Path, process: Process) -> None:
    """Waits until a running process has written a file."""
    deadline = time.monotonic() + TIME_LIMIT
    while not path.exists():
        assert process.running, process.err.read_text()
        assert time.monotonic() < deadline, f"no {path.name} after {TIME_LIMIT:.0f} s"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def pair(training: Training, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """The training in two processes that were started as torchrun starts them; what both printed."""
    if torch.cuda.is_available():
        pytest.skip("a process that has used a GPU cannot be forked")
    folder = tmp_path_factory.mktemp("pair")
    (folder / "small.yaml").write_text(RECIPE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"TORCHELASTIC_RUN_ID": "pair", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [Fork(SMALL, folder, f"rank{rank}", RANK=rank, LOCAL_RANK=rank, **common, **address) for rank in "01"]
    answers = [rank.answer() for rank in ranks]
    code = max(answer.code for answer in answers)
    return Training(
        folder / "lightning_logs/small-1",
        Answer(code, "".join(answer.out for answer in answers), "".join(answer.err for answer in answers)),
    )


@pytest.fixture
def no_gpu() -> Iterator[None]:
    """Skips a test of what a machine without GPUs answers."""
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        pytest.skip("this machine has a GPU")
    yield
