"""The number of threads follows the free cores at the start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from contract.command_line import RECIPE, SMALL, metrics_of, run_command

from cifar_lit.base import threads
from cifar_lit.base.errors import UsageError
from cifar_lit.base.hardware import core_count
from cifar_lit.base.threads import VARIABLE, choose_threads, free_cores


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin without a choice, as a new process without settings of the user. Restore torch's threads."""
    number = torch.get_num_threads()
    free_cores.cache_clear()
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    yield
    torch.set_num_threads(number)
    free_cores.cache_clear()


def machine(monkeypatch: pytest.MonkeyPatch, cores: int, share: float, torch_threads: int | None = None) -> list[int]:
    """Simulate cores and the share of them that threads get. Return a list that becomes torch's numbers of threads."""
    chosen = [torch_threads or cores]
    now = [0.0]

    def perf_counter() -> float:
        now[0] += 0.1
        return now[0]

    clock = SimpleNamespace(perf_counter=perf_counter, process_time=lambda: share * now[0])
    monkeypatch.setattr(threads, "time", clock)
    monkeypatch.setattr(threads, "core_count", lambda: cores)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: chosen[-1])
    return chosen


# ---- the measurement


@pytest.mark.parametrize(
    ("cores", "share", "free"),
    [
        (2, 1.8, 2),
        (2, 1.33, 1),
    ],
)
def test_free_cores_are_the_processor_time_that_a_thread_per_core_gets(
    monkeypatch: pytest.MonkeyPatch, cores: int, share: float, free: int
) -> None:
    machine(monkeypatch, cores, share)
    assert free_cores() == free


# ---- the choice


def test_ranks_share_the_free_cores_and_their_children_inherit_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 8, 6.4)
    assert choose_threads() == (6, "6 (6 of 8 cores are free)") and not os.environ[VARIABLE]
    assert choose_threads(processes=4)[0] == 1 and os.environ[VARIABLE] == "1"


def test_no_more_threads_than_torch_would_use(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 8, 8.0, torch_threads=4)  # one per physical core
    assert choose_threads()[0] == 4


def test_the_users_number_precedes_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 8, 1.0)
    assert choose_threads(4) == (4, "4 (set to 4)")
    assert choose_threads(100_000) == (8, "8 (set to 100000)")
    assert not os.environ[VARIABLE]
    assert choose_threads(3, typed=True, processes=2) == (3, "3 (set to 3)")
    assert os.environ[VARIABLE] == "3" and free_cores() == 3  # also for processes that decode
    monkeypatch.setenv(VARIABLE, "5")
    assert choose_threads(4) == (3, f"3 ({VARIABLE})")  # torch has read the variable when it was imported
    assert choose_threads(6, typed=True)[0] == 6
    assert choose_threads(8, typed=True)[0] == 8
    with pytest.raises(UsageError, match="--threads 9: this process may use 8 cores"):
        choose_threads(9, typed=True)


@pytest.mark.parametrize(
    ("value", "launched", "number"),
    [
        ("3,2", False, 3),
        ("99", False, 8),
        ("1", False, 1),
        ("1", True, 6),
    ],
)
def test_decoding_follows_the_variable_of_the_user_but_not_the_one_of_torchrun(
    monkeypatch: pytest.MonkeyPatch, value: str, launched: bool, number: int
) -> None:
    machine(monkeypatch, 8, 6.0)
    monkeypatch.setenv(VARIABLE, value)
    if launched:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    assert free_cores() == number


# ---- commands

UNSET = {VARIABLE: ""}  # instead of the 1 of other tests


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(RECIPE)


def test_a_training_prints_and_records_its_threads(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "free_cores", lambda: 1)
    answer = run_command("train", *SMALL, "--epochs", "1", **UNSET)
    assert answer.code == 0, answer.err
    assert f"threads      1 (1 of {core_count()} cores are free)" in answer.lines
    run = Path("lightning_logs/small-1")
    assert metrics_of(run)["threads"] == 1
    assert yaml.safe_load((run / "config.yaml").read_text())["threads"] == 1
