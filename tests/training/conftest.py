"""Runs shared by several files."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from contract.command_line import Answer
from real_runs import SCRIPT, SETTINGS, run, run_here
from small_runs import dropout_net

__all__ = ["dropout_net"]

torch.set_num_threads(1)  # nets this small only wait for a second thread


@pytest.fixture(scope="session")
def pool() -> Iterator[ThreadPoolExecutor]:
    """Run two commands at a time. They mostly wait for their imports."""
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an uninterrupted run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    answer = run_here(["train", *SETTINGS], folder)
    assert answer.code == 0, answer.err
    return folder


@pytest.fixture(scope="session")
def pair_run(pool: ThreadPoolExecutor, tmp_path_factory: pytest.TempPathFactory) -> Future[tuple[Path, Answer]]:
    """Start the same run in two processes, by `python scripts/train.py --devices 2`."""
    folder = tmp_path_factory.mktemp("pair")
    return pool.submit(lambda: (folder, run([*SCRIPT, *SETTINGS, "--devices", "2"], folder, RANK_WEIGHTS=str(folder))))


@pytest.fixture(scope="session")
def pair(pair_run: Future[tuple[Path, Answer]]) -> Path:
    """Return the folder of the run in two processes."""
    folder, answer = pair_run.result()
    assert answer.code == 0, answer.err
    return folder
