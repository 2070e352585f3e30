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
from contract.command_line import RECIPE, SMALL, metrics_of, run_command

from cifar_lit import hardware, memory
from cifar_lit.errors import UsageError
from cifar_lit.hardware import (
    SPIN_SETTINGS,
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
from cifar_lit.memory import keep_freed_memory


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
    assert choose_devices(machine, accelerator, devices) == (accelerator, chosen)
    assert count_devices(machine, accelerator, chosen) == count


def test_one_device_is_recognised_however_it_is_written() -> None:
    assert all(map(is_one_device, (1, "1", "0,", "[3]", "[3,]", [0])))
    assert not any(map(is_one_device, ("auto", "-1", "2", "0,1", "[0, 1]")))


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
        (CPU, {"auto": "cpu", "cpu": "cpu"}, ["gpu", "cuda", "mps", "cpu:1", "auto:0", "", "cuda:x"], "cpu"),
        (ONE, {"auto": "cuda", "gpu": "cuda", "cuda:0": "cuda:0"}, ["cuda:1", "mps", "auto:0"], "cpu, cuda:0"),
        (TWO, {"cuda": "cuda", "cuda:1": "cuda:1", "gpu:1": "cuda:1"}, ["gpu:2"], "cpu, cuda:0, cuda:1"),
        (MPS, {"auto": "mps", "gpu": "mps", "mps": "mps", "gpu:0": "mps", "cpu": "cpu"}, ["cuda", "gpu:1"], "cpu, mps"),
    ],
)
def test_a_device_name_becomes_a_torch_device_or_an_error_that_lists_the_devices(
    machine: Machine, names: dict[str, str], missing: list[str], devices: str
) -> None:
    assert {name: resolve_device(name, machine) for name in names} == names
    for name in missing:
        with pytest.raises(UsageError) as refusal:
            resolve_device(name, machine)
        assert str(refusal.value).startswith(f"this machine has no device {name!r}: it has {devices}.")
    with pytest.raises(
        UsageError, match=r"no device 'cuba': it has .*\. Did you mean cuda\? auto selects the fastest\."
    ):
        resolve_device("cuba", machine)


def test_this_machine_is_detected_and_auto_names_one_of_its_devices() -> None:
    machine = detect_machine()
    assert machine.threads >= 1 and machine.cpu and "GPU" in str(machine)
    types = {name.partition(":")[0] for name in machine.devices}
    assert torch.zeros(1, device=resolve_device("auto")).device.type in types


@pytest.mark.parametrize(
    ("names", "hip", "bf16", "fp16"),
    [
        (["H200 9.0", "RTX 3090 8.6"], None, True, True),
        (["RTX 4090 8.9", "Tesla T4 7.5"], None, False, True),
        (["Tesla V100-SXM2-16GB 7.0"], None, False, True),
        (["NVIDIA GeForce RTX 2080 Ti 7.5", "NVIDIA GeForce GTX 1080 6.1"], None, False, False),
        (["NVIDIA GeForce GTX 1660 Ti 7.5"], None, False, False),
        (["NVIDIA T1000 8GB 7.5"], None, False, False),
        (["AMD Instinct MI50 6.0"], "6.2", True, True),
        ([], None, False, False),
    ],
)
def test_the_least_capable_gpu_decides_about_bfloat16_and_float16(
    names: list[str], hip: str | None, bf16: bool, fp16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    machine = with_gpus(monkeypatch, names, ["sm_60", "sm_70", "sm_75", "sm_80", "sm_90"])
    assert (machine.gpu_bf16, machine.gpu_fp16) == (bf16, fp16)


# ---- GPUs without code in this torch


def with_gpus(monkeypatch: pytest.MonkeyPatch, names: list[str], codes: list[str]) -> Machine:
    """Return the detected machine with GPUs such as "Tesla T4 7.5" and a torch with these codes."""

    def properties(number: int) -> SimpleNamespace:
        name, _, capability = names[number].rpartition(" ")
        major, minor = map(int, capability.split("."))
        return SimpleNamespace(name=name, major=major, minor=minor, total_memory=1 << 30)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: codes)
    return detect_machine()


CUDA13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
P100_LINE = (
    f"Tesla P100-PCIE-16GB (sm_60) is not used: torch {torch.__version__} has no code for it; "
    "install torch 2.14 and its torchvision for CUDA 12.6, see pytorch.org/get-started/previous-versions"
)


@pytest.mark.parametrize(
    ("codes", "can", "cannot"),
    [
        (CUDA13, ["7.5", "8.0", "8.6", "8.7", "8.9", "9.0", "10.3", "12.1", "13.0"],
         ["3.7", "5.2", "6.0", "6.1", "7.0", "7.2", "11.0"]),
        (["sm_50", "sm_60", "sm_70"], ["5.2", "6.1", "7.5"], ["3.7", "8.0"]),
        (["sm_86"], ["8.6", "8.9"], ["8.0", "9.0"]),
        (["compute_70"], ["7.0", "7.5", "9.0", "12.0"], ["6.1"]),
        (["sm_90a", "compute_90a"], ["9.0"], ["9.1", "10.0"]),
        (["sm_100f"], ["10.0", "10.3"], ["11.0", "9.0"]),
        (["compute_100f"], ["10.3"], ["12.0"]),
        ([], ["3.7"], []),  # unknown
    ],
)  # fmt: skip
def test_code_runs_on_its_major_version_and_ptx_on_all_later_ones(
    monkeypatch: pytest.MonkeyPatch, codes: list[str], can: list[str], cannot: list[str]
) -> None:
    used = [gpu for gpu in (*can, *cannot) if with_gpus(monkeypatch, [f"GPU {gpu}"], codes).gpus]
    assert used == can


def test_a_gpu_without_code_is_replaced_by_the_cpu_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = with_gpus(monkeypatch, ["Tesla P100-PCIE-16GB 6.0"], CUDA13)
    assert machine.devices == ["cpu"] and machine.unusable == P100_LINE
    assert choose_devices(machine, "auto", "auto") == ("cpu", "auto")
    assert choose_devices(machine, "cpu", 2) == ("cpu", 2)
    for accelerator in ("gpu", "cuda"):
        with pytest.raises(UsageError) as refusal:
            choose_devices(machine, accelerator, "auto")
        assert str(refusal.value) == f"{P100_LINE}, or use --accelerator cpu"
    assert capsys.readouterr().err == ""
    assert resolve_device("auto", machine) == "cpu"
    assert capsys.readouterr().err == P100_LINE + "\n"
    with pytest.raises(UsageError, match="Tesla P100-PCIE-16GB"):
        resolve_device("cuda", machine)


def test_a_gpu_that_is_too_new_needs_a_newer_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = with_gpus(monkeypatch, ["RTX 5090 12.0"], ["sm_75", "sm_90"])
    assert machine.unusable.endswith("has no code for it; install a newer torch and torchvision")


def test_the_line_about_one_of_several_gpus_says_how_to_use_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = with_gpus(monkeypatch, ["T4 7.5", "P100 6.0", "T4 7.5"], CUDA13)
    assert machine.gpus == () and machine.unusable.endswith("or use the others: CUDA_VISIBLE_DEVICES=0,2")
    assert machine.unusable.startswith("P100 (sm_60)")


def test_devices_and_a_training_say_why_a_gpu_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(RECIPE.replace("  accelerator: cpu\n", ""))
    machine = Machine("a CPU", 2, bf16=False, unusable=P100_LINE)
    monkeypatch.setattr(hardware, "detect_machine", lambda: machine)
    listed = run_command("devices")
    assert P100_LINE in listed.lines and "torch finds no GPU" not in listed.out
    trained = run_command("fit", *SMALL, "--epochs", "1")
    assert (trained.code, trained.err) == (0, P100_LINE + "\n")
    assert metrics_of(Path("lightning_logs/small-1"))["accelerator"] == "cpu"
    assert run_command("fit", *SMALL, "--epochs", "1", "--accelerator", "cpu").err == ""
    refused = run_command("fit", *SMALL, "--accelerator", "gpu")
    assert (refused.code, refused.err) == (2, f"cifar-lit: {P100_LINE}, or use --accelerator cpu\n")


# ---- memory

COUNT_FAULTS = """
import resource, sys
from cifar_lit.memory import keep_freed_memory
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


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="torch ships GNU OpenMP on Linux only")
def test_idle_openmp_threads_spin_briefly_and_not_at_all_while_threads_decode() -> None:
    inherited = {name: value for name, value in os.environ.items() if name not in SPIN_SETTINGS}
    for line, count in ((["recipes"], 2000), (["classify", "model.safetensors", "cat.jpg"], 0)):
        code = f"from cifar_lit.cli import main; main({line}); import torch; torch.ones(1)"
        variables = {**inherited, "OMP_DISPLAY_ENV": "VERBOSE"}
        done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
        assert f"GOMP_SPINCOUNT = '{count}'" in done.stderr


def test_an_openmp_wait_policy_of_the_user_is_not_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"OMP_WAIT_POLICY": "ACTIVE"}
    monkeypatch.setattr(os, "environ", variables)
    limit_busy_waiting()
    assert variables == {"OMP_WAIT_POLICY": "ACTIVE"}


@pytest.mark.usefixtures("working_folder")
@pytest.mark.parametrize(
    ("line", "files", "free"),
    [
        (
            "0::/job",
            {"job/memory.max": "5000", "job/memory.current": "3000", "job/memory.stat": "inactive_file 400"},
            2400,
        ),
        (
            "0::/job",  # the system reclaims all of its file cache before a process runs out of memory
            {
                "job/memory.max": "5000",
                "job/memory.current": "3000",
                "job/memory.stat": "inactive_file 400\nactive_file 300\n",
            },
            2700,
        ),
        ("0::/job/step", {"job/memory.max": "5000", "job/memory.current": "3000", "job/memory.stat": ""}, 2000),
        ("0::/job", {"job/memory.max": "max", "job/memory.current": "3000", "job/memory.stat": ""}, None),
        (
            "4:memory:/",
            {
                "memory/memory.limit_in_bytes": "5000",
                "memory/memory.usage_in_bytes": "1000",
                "memory/memory.stat": "cache 3\ninactive_file 1000\n",
            },
            5000,
        ),
    ],
)
def test_the_memory_limits_of_containers_and_jobs_count(
    line: str, files: dict[str, str], free: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        Path("groups", name).parent.mkdir(parents=True, exist_ok=True)
        Path("groups", name).write_text(text)
    read = Path.read_text
    own: dict[Path, Any] = {Path("/proc/self/cgroup"): line}
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=900 * 1024))
    monkeypatch.setattr(memory, "CGROUPS", Path("groups").absolute())
    monkeypatch.setattr(Path, "read_text", lambda path, *args, **more: own.get(path) or read(path, *args, **more))
    assert memory.free_memory(torch.device("cpu")) == (900 * 1024 if free is None else free)


def test_several_gpus_are_refused_on_windows_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(RECIPE)
    monkeypatch.setattr(hardware, "detect_machine", lambda: TWO)
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    answer = run_command("fit", *SMALL, "--accelerator", "gpu")
    assert answer.code == 2 and answer.err.endswith("use --devices 1, or WSL 2\n") and answer.err.count("\n") == 1
