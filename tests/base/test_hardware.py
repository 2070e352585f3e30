"""Choice of device and precision, and reuse of freed memory."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from cifar_lit.base import hardware, memory
from cifar_lit.base.errors import UsageError
from cifar_lit.base.hardware import (
    Machine,
    choose_devices,
    choose_precision,
    count_devices,
    detect_machine,
    is_one_device,
    limit_busy_waiting,
    probe_bf16,
    resolve_device,
)
from cifar_lit.base.memory import keep_freed_memory


def gpus(count: int, bf16: bool = True, fp16: bool = True) -> Machine:
    memory = {"gpus": (("H200", 140 << 30),) * count}
    return Machine(cpu="a CPU", threads=4, bf16=False, **memory, gpu_bf16=bf16, gpu_fp16=fp16)


CPU, CPU_BF16 = Machine(cpu="a CPU", threads=4, bf16=False), Machine(cpu="a CPU", threads=4, bf16=True)
CPU_BUILD = Machine(cpu="a CPU", threads=4, bf16=False, cuda_build=False)
MPS = Machine(cpu="an M3", threads=8, bf16=False, mps=True, cuda_build=False)
ONE, TWO, EIGHT = gpus(1), gpus(2), gpus(8)
T4, P100 = gpus(2, bf16=False), gpus(1, bf16=False, fp16=False)


@pytest.mark.parametrize(
    ("machine", "accelerator", "devices", "chosen", "count"),
    [
        (CPU, "auto", "auto", "auto", 1), (CPU, "auto", 2, 2, 2), (MPS, "auto", "auto", "auto", 1),
        (MPS, "gpu", "1", 1, 1), (ONE, "gpu", "-1", -1, 1), (ONE, "auto", "0,", [0], 1), (TWO, "cuda", "[1]", [1], 1),
        (TWO, "auto", [1, 0], [1, 0], 2), (TWO, "auto", -1, -1, 2), (TWO, "cpu", "2", 2, 2),
        (EIGHT, "gpu", "8", 8, 8), (EIGHT, "gpu", "3, 7", [3, 7], 2),
        (CPU, "tpu", "auto", "auto", 1),  # only the Trainer can detect it
    ],
)  # fmt: skip
def test_devices_that_exist_are_passed_to_the_trainer(
    machine: Machine, accelerator: str, devices: Any, chosen: Any, count: int
) -> None:
    assert choose_devices(machine, accelerator, devices) == chosen
    assert count_devices(machine, accelerator, chosen) == count


def test_one_device_is_recognised_however_it_is_written() -> None:
    assert all(map(is_one_device, (1, "1", "0,", "[3]", "[3,]", [0])))
    assert not any(map(is_one_device, ("auto", "-1", "2", "0,1", "[0, 1]")))


NO_GPU = "this machine has no GPU, only a CPU with 4 threads"
INSTEAD = "leave --accelerator out, or use --accelerator cpu"
CPUS_ONLY = "and this torch is a build for CPUs only"
NAMES = "{} selects GPUs, but the accelerator is the CPU ({}). Use a number: --devices 2 runs two processes"
MORE = "{}: this machine has GPUs 0 H200, 1 H200. Use --devices 2, or leave it out"
NONE = "{} is not a valid device list: use a number (2), ids (0,1) or auto"


@pytest.mark.parametrize(
    ("machine", "accelerator", "devices", "line"),
    [
        (CPU, "gpu", "auto", f"{NO_GPU}: {INSTEAD}"),
        (CPU_BUILD, "gpu", "auto", f"{NO_GPU}, {CPUS_ONLY}: {INSTEAD}"),
        (MPS, "cuda", "auto", f"this machine has an Apple GPU (mps), {CPUS_ONLY}: {INSTEAD}"),
        (CPU, "mps", "auto", f"{NO_GPU}: {INSTEAD}"),
        *((CPU, "auto", devices, NAMES.format(f"--devices {devices}", NO_GPU)) for devices in ("0,1", "-1")),
        (TWO, "cpu", [1], NAMES.format("--devices [1]", "this machine has GPUs 0 H200, 1 H200")),
        *((TWO, "gpu", devices, MORE.format(f"--devices {devices}")) for devices in ("3", "[2]", "0,2")),
        *((TWO, "auto", devices, NONE.format(f"--devices {devices}")) for devices in ("0", "-2", "two", "0,-1", "")),
    ],
)
def test_an_error_about_missing_devices_lists_the_devices_of_the_machine(
    machine: Machine, accelerator: str, devices: Any, line: str
) -> None:
    with pytest.raises(UsageError) as refusal:
        choose_devices(machine, accelerator, devices)
    assert str(refusal.value) == line


@pytest.mark.parametrize(
    ("machine", "accelerators", "gain", "precision"),
    [
        (CPU, ("auto", "cpu"), 2.0, "32-true"),
        (CPU_BF16, ("auto", "cpu"), 2.0, "bf16-mixed"),
        (CPU_BF16, ("auto", "cpu"), 0.5, "32-true"),
        (MPS, ("auto", "mps", "gpu", "cpu"), 2.0, "32-true"),
        (TWO, ("auto", "gpu", "cuda"), 0.5, "bf16-mixed"),
        (T4, ("auto", "gpu"), 2.0, "16-mixed"),
        (P100, ("auto", "gpu"), 2.0, "32-true"),
    ],
)
def test_16_bits_are_chosen_on_gpus_that_support_them_and_on_cpus_that_are_faster_with_them(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, accelerators: tuple[str, ...], gain: float, precision: str
) -> None:
    monkeypatch.setattr(hardware, "probe_bf16", lambda: gain)
    for accelerator in accelerators:
        chosen, reason = choose_precision(machine, accelerator)
        assert chosen == precision and reason


def test_the_bf16_probe_changes_neither_thread_count_nor_random_state() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    assert probe_bf16() > 0
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


# ---- for commands without a Trainer


@pytest.mark.parametrize(
    ("machine", "names", "missing", "devices"),
    [
        (CPU, {"auto": "cpu", "cpu": "cpu"}, ["gpu", "cuda", "mps", "cpu:1", "", "cuba"], "cpu"),
        (ONE, {"auto": "cuda", "gpu": "cuda", "cuda:0": "cuda:0"}, ["cuda:1", "mps"], "cpu, cuda:0"),
        (TWO, {"cuda": "cuda", "cuda:1": "cuda:1", "gpu:1": "cuda:1"}, ["gpu:2"], "cpu, cuda:0, cuda:1"),
        (MPS, {"auto": "mps", "gpu": "mps", "mps": "mps", "cpu": "cpu"}, ["cuda", "gpu:1"], "cpu, mps"),
    ],
)
def test_a_device_name_becomes_a_torch_device_or_an_error_that_lists_the_devices(
    machine: Machine, names: dict[str, str], missing: list[str], devices: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cifar_lit.base.hardware.detect_machine", lambda: machine)
    assert {name: resolve_device(name) for name in names} == names
    for name in missing:
        with pytest.raises(UsageError) as refusal:
            resolve_device(name)
        assert str(refusal.value) == f"this machine has no device {name!r}: it has {devices}"


def test_this_machine_is_detected_and_auto_names_one_of_its_devices() -> None:
    machine = detect_machine()
    assert machine.threads >= 1 and machine.cpu and "GPU" in str(machine)
    types = {name.partition(":")[0] for name in machine.devices}
    assert torch.zeros(1, device=resolve_device("auto")).device.type in types


@pytest.mark.parametrize(
    ("gpus", "hip", "bf16", "fp16"),
    [
        ({"H100": "9.0", "RTX 3090": "8.6"}, None, True, True),
        ({"RTX 4090": "8.9", "Tesla T4": "7.5"}, None, False, True),
        ({"Tesla T4": "7.5", "GTX 1080": "6.1"}, None, False, False),
        ({"GTX 1660 Ti": "7.5"}, None, False, False),  # float16 gives NaN there
        ({"MI210": "6.0"}, "6.2", True, True),
        ({}, None, False, False),
    ],
)
def test_the_least_capable_gpu_decides_about_precision(
    gpus: dict[str, str], hip: str | None, bf16: bool, fp16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def properties(number: int) -> SimpleNamespace:
        name, capability = [*gpus.items()][number]
        major, minor = map(int, capability.split("."))
        return SimpleNamespace(name=name, major=major, minor=minor, total_memory=1 << 30)

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    machine = detect_machine()
    assert (machine.gpu_bf16, machine.gpu_fp16) == (bf16, fp16)
    assert len(machine.gpus) == len(gpus)


# ---- memory

COUNT_FAULTS = """
import resource, sys
from cifar_lit.base.memory import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    parts = [b"x" * count for count in (3_000_000, 20_000_000, 48_000_000)]
    del parts
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print([step() for _ in range(4)][-1])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_memory_freed_by_a_step_is_reused_by_the_next_without_page_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = {}
    for mode in ("keep", "default"):
        done = subprocess.run([sys.executable, "-c", COUNT_FAULTS, mode], capture_output=True, check=True)
        faults[mode] = int(done.stdout)
    assert faults["keep"] < 10
    assert faults["default"] > faults["keep"]  # about 17,000 with pages of 4 KiB
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    keep_freed_memory()  # no error with another C library


def test_an_openmp_wait_policy_of_the_user_is_not_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"OMP_WAIT_POLICY": "ACTIVE"}
    monkeypatch.setattr(os, "environ", variables)
    limit_busy_waiting()
    assert variables == {"OMP_WAIT_POLICY": "ACTIVE"}


@pytest.mark.usefixtures("working_folder")
@pytest.mark.parametrize(
    ("limit", "cached", "free"),
    [("5000", "inactive_file 400\nactive_file 300\n", 2700), ("5000", "", 2000), ("max", "", 900 * 1024)],
)
def test_the_memory_limits_of_containers_and_jobs_count(
    limit: str, cached: str, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system reclaims the file cache before a process runs out of memory."""
    Path("job/step").mkdir(parents=True)
    for name, text in {"max": limit, "current": "3000", "stat": cached}.items():
        Path(f"job/memory.{name}").write_text(text)
    read = Path.read_text
    own: dict[Path, Any] = {Path("/proc/self/cgroup"): "0::/job/step"}
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=900 * 1024))
    monkeypatch.setattr(memory, "CGROUPS", Path.cwd())
    monkeypatch.setattr(Path, "read_text", lambda path, *args, **more: own.get(path) or read(path, *args, **more))
    assert memory.free_memory(torch.device("cpu")) == free
