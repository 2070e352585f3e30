"""Runs that several files look at, made once."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from contract.command_line import Answer
from real_runs import SCRIPT, SETTINGS, here, run
from small_runs import build_dropout

from cifar_lit.models.registry import NETS, NetSpec

torch.set_num_threads(1)  # nets this small only wait for a second thread, long where the cores are taken


@pytest.fixture
def dropout_net(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `build_dropout` known as the net "dropout"; it takes images of any size."""
    monkeypatch.setitem(NETS, "dropout", NetSpec(build_dropout, min_size=8, any_size=True))


@pytest.fixture(scope="session")
def pool() -> Iterator[ThreadPoolExecutor]:
    """Two commands at a time: they mostly wait for their imports."""
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that nobody disturbed, in one process."""
    folder = tmp_path_factory.mktemp("alone")
    done = here(["train", *SETTINGS], folder)
    assert done.code == 0, done.err
    return folder


@pytest.fixture(scope="session")
def pair_run(pool: ThreadPoolExecutor, tmp_path_factory: pytest.TempPathFactory) -> Future[tuple[Path, Answer]]:
    """The same in two processes, by `python scripts/train.py --devices 2`."""
    folder = tmp_path_factory.mktemp("pair")
    return pool.submit(lambda: (folder, run([*SCRIPT, *SETTINGS, "--devices", "2"], folder, RANK_WEIGHTS=str(folder))))


@pytest.fixture(scope="session")
def pair(pair_run: Future[tuple[Path, Answer]]) -> Path:
    """Its folder."""
    folder, done = pair_run.result()
    assert done.code == 0, done.err
    return folder
