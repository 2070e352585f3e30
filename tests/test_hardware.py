"""Which device computes, whatever command asks; in which precision; and what becomes of freed memory."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from typing import Any

import pytest
import torch

from cifar_lit import hardware
from cifar_lit.errors import UsageError
from cifar_lit.hardware import (
    SPIN_SETTINGS,
    Machine,
    choose_devices,
    choose_precision,
    count_devices,
    detect_machine,
    keep_freed_memory,
    limit_busy_waiting,
    probe_bf16,
    resolve_device,
)


def gpus(count: int, bf16: bool = True) -> Machine:
    return Machine(cpu="a CPU", threads=4, bf16=False, gpus=(("H200", 140 << 30),) * count, gpu_bf16=bf16)


CPU, CPU_BF16 = Machine(cpu="a CPU", threads=4, bf16=False), Machine(cpu="a CPU", threads=4, bf16=True)
CPU_BUILD = Machine(cpu="a CPU", threads=4, bf16=False, cuda_build=False)
MPS = Machine(cpu="an M3", threads=8, bf16=False, mps=True, cuda_build=False)
ONE, TWO, EIGHT, OLD = gpus(1), gpus(2), gpus(8), gpus(1, bf16=False)


@pytest.mark.parametrize(
    ("machine", "accelerator", "devices", "chosen", "count"),
    [
        (CPU, "auto", "auto", "auto", 1), (CPU, "auto", 2, 2, 2), (MPS, "auto", "auto", "auto", 1), (MPS, "gpu", "1", 1, 1),
        (ONE, "gpu", "-1", -1, 1), (ONE, "auto", "0,", [0], 1), (TWO, "cuda", "[1]", [1], 1), (TWO, "auto", [1, 0], [1, 0], 2),
        (TWO, "auto", -1, -1, 2), (TWO, "cpu", "2", 2, 2), (EIGHT, "gpu", "8", 8, 8), (EIGHT, "gpu", "3, 7", [3, 7], 2),
        (CPU, "tpu", "auto", "auto", 1),  # which only the Trainer can look for
    ],
)  # fmt: skip
def test_what_the_machine_has_is_passed_to_the_trainer(
    machine: Machine, accelerator: str, devices: Any, chosen: Any, count: int
) -> None:
    assert choose_devices(machine, accelerator, devices) == (accelerator, chosen)
    assert count_devices(machine, accelerator, chosen) == count


NO_GPU = "this machine has no GPU, only a CPU with 4 threads"
INSTEAD = "leave --accelerator out, or use --accelerator cpu"
CPUS_ONLY = "and this torch is a build for CPUs only"
NAMES = "{} selects GPUs, but the accelerator is the CPU ({}). Use a number: --devices 2 runs two processes"
MORE = "{}: this machine has GPUs 0 H200, 1 H200. Use --devices 2, or leave it out"
NONE = "{} is not a valid device list: use a number (2), ids (0,1) or auto."


@pytest.mark.parametrize(
    ("machine", "accelerator", "devices", "line"),
    [
        (CPU, "gpu", "auto", f"{NO_GPU}: {INSTEAD}"),
        (CPU_BUILD, "gpu", "auto", f"{NO_GPU}, {CPUS_ONLY}: {INSTEAD}"),
        (MPS, "cuda", "auto", f"this machine has an Apple GPU (mps), {CPUS_ONLY}: {INSTEAD}"),
        (CPU, "mps", "auto", f"{NO_GPU}, not Apple's: {INSTEAD}"),
        *((CPU, "auto", devices, NAMES.format(f"--devices {devices}", NO_GPU)) for devices in ("0,1", "-1")),
        (TWO, "cpu", [1], NAMES.format("--devices [1]", "this machine has GPUs 0 H200, 1 H200")),
        *((TWO, "gpu", devices, MORE.format(f"--devices {devices}")) for devices in ("3", "[2]", "0,2")),
        *(
            (TWO, "auto", devices, NONE.format(f"--devices {devices}"))
            for devices in ("0", "-2", "two", "0;1", "1,1", "[]", "0,-1", "", "01x", "0," + "1" * 40 + "x")
        ),
    ],
)
def test_what_the_machine_lacks_is_answered_with_what_it_has(
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
        (OLD, ("auto", "gpu"), 2.0, "32-true"),
    ],
)
def test_precision_is_bf16_where_the_device_computes_in_it_and_a_cpu_gains_by_it(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, accelerators: tuple[str, ...], gain: float, precision: str
) -> None:
    monkeypatch.setattr(hardware, "probe_bf16", lambda: gain)
    for accelerator in accelerators:
        chosen, reason = choose_precision(machine, accelerator)
        assert chosen == precision and reason  # for the start card


def test_the_probe_of_bf16_leaves_threads_and_random_numbers_as_they_are() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    assert probe_bf16() > 0
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


# ---- for commands without a Trainer


@pytest.mark.parametrize(
    ("machine", "names", "missing", "devices"),
    [
        (CPU, {"auto": "cpu", "cpu": "cpu"}, ["gpu", "cuda", "mps", "cpu:1", "auto:0", "", "cuda:x"], "cpu"),
        (ONE, {"auto": "cuda", "gpu": "cuda", "cuda:0": "cuda:0"}, ["cuda:1", "mps", "auto:0"], "cpu, cuda:0"),
        (TWO, {"cuda": "cuda", "cuda:1": "cuda:1", "gpu:1": "cuda:1"}, ["gpu:2"], "cpu, cuda:0, cuda:1"),
        (MPS, {"auto": "mps", "gpu": "mps", "mps": "mps", "gpu:0": "mps", "cpu": "cpu"}, ["cuda", "gpu:1"], "cpu, mps"),
    ],
)
def test_a_name_is_turned_into_torchs_or_answered_with_the_devices_there_are(
    machine: Machine, names: dict[str, str], missing: list[str], devices: str
) -> None:
    assert {name: resolve_device(name, machine) for name in names} == names
    for name in missing:
        with pytest.raises(UsageError) as refusal:
            resolve_device(name, machine)
        assert str(refusal.value).startswith(f"this machine has no device {name!r}: it has {devices}.")
    with pytest.raises(UsageError, match=r"no device 'cuba': it has .*\. Did you mean cuda\? auto takes the fastest\."):
        resolve_device("cuba", machine)


def test_this_machine_is_seen_and_computes_where_auto_says() -> None:
    machine = detect_machine()
    assert machine.threads >= 1 and machine.cpu and "GPU" in str(machine)
    assert torch.zeros(1, device=resolve_device("auto")).device.type in {
        name.partition(":")[0] for name in machine.devices
    }


# ---- memory

COUNT_FAULTS = """
import resource, sys
from cifar_lit.hardware import keep_freed_memory
assert sys.argv[1] == "left" or keep_freed_memory()
def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    parts = [b"x" * count for count in (3_000_000, 20_000_000, 48_000_000)]
    del parts
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print([step() for _ in range(4)][-1])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep memory")
def test_what_a_step_frees_serves_the_next_without_new_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", COUNT_FAULTS]
    kept, left = (
        int(subprocess.run([*command, how], capture_output=True, check=True).stdout) for how in ("kept", "left")
    )
    assert kept < 10
    assert left > kept  # some 17,000 where pages are of 4 KiB
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not keep_freed_memory()  # another C library is left as it is


@pytest.mark.skipif(sys.platform != "linux", reason="torch brings GNU OpenMP on Linux only")
def test_idle_openmp_threads_give_up_their_core_soon_and_at_once_beside_those_that_decode() -> None:
    inherited = {name: value for name, value in os.environ.items() if name not in SPIN_SETTINGS}
    for line, count in ((["recipes"], 2000), (["classify", "model.safetensors", "cat.jpg"], 0)):
        code = f"from cifar_lit.cli import main; main({line}); import torch; torch.ones(1)"
        variables = {**inherited, "OMP_DISPLAY_ENV": "VERBOSE"}
        done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
        assert f"GOMP_SPINCOUNT = '{count}'" in done.stderr


def test_what_the_user_decides_of_openmps_waiting_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", variables := {"OMP_WAIT_POLICY": "ACTIVE"})
    limit_busy_waiting()
    assert variables == {"OMP_WAIT_POLICY": "ACTIVE"}
