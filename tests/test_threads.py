"""The number of threads follows the free cores at the start; a note names the cause if steps become slow later."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import yaml
from contract.command_line import RECIPE, SMALL, metrics_of, run_command

from cifar_lit import hardware, threads
from cifar_lit.errors import UsageError
from cifar_lit.hardware import CpuLimit, core_count, cpu_limits
from cifar_lit.threads import VARIABLE, ProcessorLoad, choose_threads, free_cores
from cifar_lit.training import callbacks
from cifar_lit.training.callbacks import SlowdownWarning


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


def machine(monkeypatch: pytest.MonkeyPatch, cores: int, free: float, torch_threads: int | None = None) -> list[int]:
    """Simulate a machine; return a list that becomes torch's numbers of threads."""
    chosen = [torch_threads or cores]
    monkeypatch.setattr(threads, "core_count", lambda: cores)
    monkeypatch.setattr(threads, "MEASURE_SECONDS", 0.0)
    monkeypatch.setattr(ProcessorLoad, "free", lambda self: free)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: chosen[-1])
    return chosen


# ---- the measurement


@pytest.mark.parametrize(
    ("idle", "own", "group", "free"),
    [
        ((0.5, 0.5), 0.0, None, 2.0),
        ((0.4, 0.1), 0.0, None, 1.0),  # others use one core
        ((0.0, 0.0), 0.5, None, 1.0),  # what this process uses itself is free for it
        ((0.0, 0.0), 0.0, None, 0.0),
        ((0.5, 0.5), 0.0, (1.5, 0.0), 1.5),  # a container with a limit
        ((0.3, 0.2), 0.5, (1.5, 0.75), 1.0),  # this and other processes use all of it
        ((0.2, 0.1), 0.0, (8.0, 0.5), 0.6),  # a limit above what is idle
    ],
)
def test_free_cores_are_idle_or_used_by_this_process_and_within_the_limit_of_the_container(
    monkeypatch: pytest.MonkeyPatch,
    idle: tuple[float, float],
    own: float,
    group: tuple[float, float] | None,
    free: float,
) -> None:
    clock = SimpleNamespace(perf_counter=lambda: now, process_time=lambda: now and own)
    monkeypatch.setattr(threads, "time", clock)
    monkeypatch.setattr(threads, "core_numbers", lambda: [1, 2])

    def cpu_times(percpu: bool) -> list[Any]:
        return [
            SimpleNamespace(idle=9 * now),
            *(SimpleNamespace(idle=now and each / 2, iowait=now and each / 2) for each in idle),
        ]

    monkeypatch.setattr(psutil, "cpu_times", cpu_times)
    limits = [SimpleNamespace(cores=group[0], used=lambda: now and group[1])] if group else []
    monkeypatch.setattr(threads, "cpu_limits", lambda: limits)
    now = 0.0
    load = ProcessorLoad()
    now = 0.5
    assert load.seconds == 0.5
    assert load.free() == pytest.approx(free)


def test_the_cores_of_this_machine_are_measured() -> None:
    assert 1 <= free_cores() <= core_count()
    assert psutil.Process().num_threads() < 200


@pytest.mark.parametrize(
    ("files", "limits", "cores"),
    [
        ({"job/cpu.max": "150000 100000", "cpu.max": "max 100000"}, [1.5], 2),
        ({"job/cpu.max": "max 100000"}, [], 4),
        ({"job/cpu.max": "10000 100000"}, [0.1], 1),
        ({"cpu,cpuacct/job/cpu.cfs_quota_us": "300000", "cpu,cpuacct/job/cpu.cfs_period_us": "100000"}, [3.0], 3),
        ({"cpu,cpuacct/job/cpu.cfs_quota_us": "-1", "cpu,cpuacct/job/cpu.cfs_period_us": "100000"}, [], 4),
        ({"job/cpu.max": "nonsense"}, [], 4),
    ],
)
def test_a_container_may_use_the_cores_of_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], limits: list[float], cores: int
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    groups = [("", tmp_path / "job"), ("", tmp_path), ("cpu,cpuacct", tmp_path / "cpu,cpuacct/job")]
    monkeypatch.setattr(hardware, "_cgroups", lambda: groups)
    monkeypatch.setattr(hardware, "core_numbers", lambda: [0, 1, 2, 3])
    assert [limit.cores for limit in cpu_limits()] == limits
    assert core_count() == cores


def test_the_processor_time_of_a_container_is_read(tmp_path: Path) -> None:
    (tmp_path / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 9\n")
    assert CpuLimit(1, tmp_path).used() == 2.5
    assert CpuLimit(1, tmp_path / "version 1").used() == 0


# ---- the choice


@pytest.mark.parametrize(
    ("cores", "free", "number"),
    [(2, 1.9, 2), (2, 1.4, 1), (2, 0.0, 1), (8, 7.6, 8), (8, 3.4, 3), (4, 9.0, 4), (1, 1.0, 1)],
)
def test_there_are_as_many_threads_as_free_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, free: float, number: int
) -> None:
    chosen = machine(monkeypatch, cores, free)
    assert choose_threads() == (number, f"{number} of {cores} cores are free")
    assert chosen[-1] == number


def test_ranks_share_the_free_cores_and_their_children_inherit_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 8, 6.0)
    assert choose_threads(processes=4)[0] == 1
    assert os.environ[VARIABLE] == "1"
    assert free_cores() == 6  # decoding in the first rank uses all of them


def test_no_more_threads_than_torch_would_use(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 8, 8.0, torch_threads=4)  # one per physical core
    assert choose_threads()[0] == 4


def test_the_users_number_precedes_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 8, 1.0)
    assert choose_threads(recorded=4) == (4, "4 in the configuration")
    assert choose_threads(recorded=100_000)[0] == 8
    assert choose_threads(typed=3, recorded=4, processes=2) == (3, "--threads")
    assert os.environ[VARIABLE] == "3" and free_cores() == 3  # also for processes that decode
    monkeypatch.setenv(VARIABLE, "5")
    assert choose_threads(recorded=4) == (3, VARIABLE)  # torch has read the variable when it was imported
    assert choose_threads(typed=6)[0] == 6
    with pytest.raises(UsageError, match="--threads 9: this machine has 8 cores"):
        choose_threads(typed=9)


@pytest.mark.parametrize(
    ("value", "launched", "number"),
    [
        ("3", False, 3),
        ("3,2", True, 3),
        ("99", False, 8),
        ("0", False, 1),
        ("1", False, 1),
        ("1", True, 6),
        ("x", False, 6),
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
    monkeypatch.setattr(ProcessorLoad, "free", lambda self: 1.2)
    monkeypatch.setattr(threads, "core_count", lambda: 2)
    answer = run_command("train", *SMALL, "--epochs", "1", **UNSET)
    assert answer.code == 0, answer.err
    assert "threads      1 (1 of 2 cores are free)" in answer.lines
    run = Path("lightning_logs/small-1")
    assert metrics_of(run)["threads"] == 1
    assert yaml.safe_load((run / "config.yaml").read_text())["threads"] == 1


def test_evaluation_and_lists_do_not_measure(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_command("train", *SMALL, "--epochs", "1", "--threads", "1").code == 0
    free_cores.cache_clear()
    monkeypatch.setattr(threads, "ProcessorLoad", lambda: pytest.fail("measured"))
    best = "lightning_logs/small-1/checkpoints/best.ckpt"
    lines = (["--help"], ["recipes"], ["devices"], ["fit", *SMALL, "--print_config"], ["test", "--ckpt_path", best])
    for line in lines:
        assert run_command(*line, **UNSET).code == 0, line


def test_threads_of_a_configuration_are_limited_to_the_cores(small: None) -> None:
    Path("many.yaml").write_text("threads: 1000000\n")
    assert run_command(*SMALL, "--config", "many.yaml", "--epochs", "1", **UNSET).code == 0
    assert metrics_of(Path("lightning_logs/small-1"))["threads"] == core_count()
    refusal = run_command(*SMALL, "--threads", "1000000")
    assert refusal.code == 2 and "--threads 1000000: this machine has" in refusal.err
    assert run_command(*SMALL, "--threads", "0").code == 2


# ---- slow steps


class Steps:
    """A training whose steps take a given time on a given number of free cores."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, threads: int, device: str = "cpu") -> None:
        self.now, self.free = 0.0, float(threads)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        monkeypatch.setattr(callbacks, "ProcessorLoad", lambda: Load(self))
        self.module = SimpleNamespace(device=torch.device(device))
        self.trainer = SimpleNamespace(is_global_zero=True)
        self.callback = SlowdownWarning()
        self.callback.on_train_start(self.trainer, self.module)  # type: ignore[arg-type]

    def run(self, seconds: float, free: float, count: int = 40) -> None:
        self.free = free
        for batch in range(count):
            self.callback.on_train_batch_start(self.trainer, self.module, None, batch)  # type: ignore[arg-type]
            self.now += seconds
            self.callback.on_train_batch_end(self.trainer, self.module, None, None, batch)  # type: ignore[arg-type]

    def validate(self, seconds: float) -> None:
        self.now += seconds
        self.callback.on_validation_start(self.trainer, self.module)  # type: ignore[arg-type]


class Load:
    def __init__(self, steps: Steps) -> None:
        self._steps, self._start = steps, steps.now

    @property
    def seconds(self) -> float:
        return self._steps.now - self._start

    def free(self) -> float:
        return self._steps.free


@pytest.mark.parametrize(
    ("threads", "free", "remedy"),
    [(2, 1.1, "or stop this training and add --resume --threads 1"), (1, 0.4, "end them")],
)
def test_steps_that_become_slow_because_cores_are_taken_give_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], threads: int, free: float, remedy: str
) -> None:
    steps = Steps(monkeypatch, threads)
    steps.run(0.02, threads)
    steps.run(0.12, free)
    steps.run(0.5, free)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("a step takes 6 times its usual time") and f"get {free} cores" in line
    assert line.endswith(remedy)


@pytest.mark.parametrize(
    ("slow", "free", "device"),
    [
        (0.2, 2.0, "cpu"),  # waits for a disk
        (0.08, 0.5, "cpu"),  # four times
        (0.2, 0.5, "meta"),  # computed elsewhere
    ],
)
def test_other_slow_steps_give_no_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], slow: float, free: float, device: str
) -> None:
    steps = Steps(monkeypatch, 2, device)
    steps.run(0.02, 2.0)
    steps.run(slow, free)
    assert capsys.readouterr().err == ""


def test_the_time_of_a_validation_does_not_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = Steps(monkeypatch, 2)
    steps.run(0.02, 2.0)
    steps.run(0.02, 0.5, count=2)
    steps.validate(30.0)
    steps.run(0.02, 0.5)
    assert capsys.readouterr().err == ""
