"""What this machine has, and whether it has what was asked for."""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cifar_lit.errors import UsageError, nearest

if TYPE_CHECKING:
    import torch

# ---- From what a user calls a device to what torch calls it, for commands that compute without a Trainer.

DEVICE_KINDS = ("auto", "cpu", "gpu", "cuda", "mps")


class Accelerators(NamedTuple):
    """What a machine has besides its CPU: CUDA or ROCm devices, and whether an Apple GPU."""

    gpus: int
    mps: bool

    def __str__(self) -> str:
        cuda = [f"cuda:{number}" for number in range(self.gpus)]
        return ", ".join(["cpu", *cuda, *(["mps"] if self.mps else [])])


def detect_accelerators() -> Accelerators:
    """What torch finds on this machine."""
    import torch

    return Accelerators(torch.cuda.device_count() if torch.cuda.is_available() else 0, torch.backends.mps.is_available())


def resolve_device(name: str, machine: Accelerators | None = None) -> str:
    """torch's name of a device: "cpu", "cuda", "cuda:1" or "mps".

    name: auto (the first GPU, else Apple's, else the CPU), cpu, gpu (Apple's where there is no other), cuda, mps; gpu:1 and
    cuda:1 are the second one. machine: this one if not given. Raises UsageError, with what the machine has, for what it has not.
    """
    machine = machine or detect_accelerators()
    found = re.fullmatch(rf"({'|'.join(DEVICE_KINDS)})(?::(\d+))?", name)
    kind, number = (found[1], found[2]) if found else ("", None)
    if number is None and kind in ("auto", "gpu", "cuda") and machine.gpus:
        return "cuda"
    if number is not None and kind in ("gpu", "cuda") and int(number) < machine.gpus:
        return f"cuda:{int(number)}"
    if number in (None, "0") and kind in ("auto", "gpu", "mps") and machine.mps and not (kind == "auto" and number):
        return "mps"
    if number is None and kind in ("auto", "cpu"):
        return "cpu"
    hint = "" if found else nearest(name, DEVICE_KINDS)
    raise UsageError(f"this machine has no device {name!r}: it has {machine}.{hint} auto takes the fastest.")


# ---- The C library's memory, which on a CPU decides over a fifth of a training step's time.

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_… of glibc's malloc.h
LARGEST_KEPT = 2**30  # bytes


def keep_freed_memory() -> bool:
    """Lets this process keep the memory that it frees, for the next step; returns whether the C library can be told so.

    By itself, glibc hands large blocks back to the system, as soon as a tensor is freed, and the system clears each of their
    pages anew when the next step asks for them: a tenth to a third of a step's time on two cores, for tensors of 1 to 50 MB.
    The process is then as large as it was at its peak until it ends. Blocks above 1 GiB are still handed back. Other
    libraries (macOS, Windows, musl) are left as they are, and so is an allocator that was loaded before it.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    # glibc before 2.35 refuses a threshold above 32 MiB, and is then left with the most that it takes
    kept = mallopt(_MMAP_THRESHOLD, LARGEST_KEPT) or mallopt(_MMAP_THRESHOLD, 32 * 2**20)
    return bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1) and kept)


LEAST_GAIN = 0.9  # of bf16 in the probe; where it pays it is 1.5 and more, so that noise does not decide
ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps", "tpu", "hpu")


@dataclass(frozen=True)
class Machine:
    """The accelerators that torch can use here.

    gpus: name and memory in bytes of each CUDA or ROCm device. mps: an Apple GPU. bf16: matrix work in bfloat16 pays
    on the CPU (AVX512-BF16, AMX). cuda_build: whether torch was built for GPUs at all.
    """

    cpu: str
    threads: int
    bf16: bool
    gpus: tuple[tuple[str, int], ...] = ()
    gpu_bf16: bool = False
    mps: bool = False
    cuda_build: bool = True

    def __str__(self) -> str:
        if self.gpus:
            names = ", ".join(f"{number} {name}" for number, (name, _) in enumerate(self.gpus))
            return f"GPUs {names}"
        return "an Apple GPU (mps)" if self.mps else f"no GPU, a CPU with {self.threads} threads"


def detect_machine() -> Machine:
    """This machine, as torch sees it."""
    import torch

    gpus: list[tuple[str, int]] = []
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(number)
            gpus.append((found.name, found.total_memory))
    return Machine(
        cpu=cpu_name(),
        threads=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        bf16=_cpu_bf16(),
        gpus=tuple(gpus),
        gpu_bf16=bool(gpus) and torch.cuda.is_bf16_supported(including_emulation=False),
        mps=torch.backends.mps.is_available(),
        cuda_build=torch.backends.cuda.is_built(),
    )


def cpu_name() -> str:
    """The processor's name, as far as the system tells."""
    import platform

    try:
        with Path("/proc/cpuinfo").open() as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cpu_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware; elsewhere bf16 is slower than float32."""
    import torch

    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, check, lambda: False)()) for check in checks)


def choose_devices(machine: Machine, accelerator: str, devices: Any) -> tuple[str, Any]:
    """Accelerator and devices as the Trainer takes them, checked against the machine.

    devices: a number, a list of ids, or such as a string (`2`, `0,1`, `[1]`, `auto`, `-1` for all).
    Raises UsageError, with what the machine has, for what it does not.
    """
    if accelerator not in ACCELERATORS:
        raise UsageError(f"no accelerator is called {accelerator!r}.{nearest(accelerator, ACCELERATORS)}")
    wants_gpu = accelerator in ("gpu", "cuda") or (accelerator == "auto" and bool(machine.gpus))
    if accelerator in ("gpu", "cuda") and not machine.gpus and not (accelerator == "gpu" and machine.mps):
        build = "" if machine.cuda_build else ", and this torch is a build for CPUs only"
        raise UsageError(f"this machine has {machine}{build}: leave --accelerator out, or use --accelerator cpu")
    if accelerator == "mps" and not machine.mps:
        raise UsageError(f"this machine has {machine}, not Apple's: leave --accelerator out, or use --accelerator cpu")
    chosen = _parse_devices(devices)
    if chosen == "auto":
        return accelerator, chosen
    if not wants_gpu and accelerator in ("auto", "cpu"):
        if machine.mps and accelerator == "auto":
            return accelerator, chosen
        if isinstance(chosen, list):
            raise UsageError(
                f"--devices {devices} names GPUs, but this machine has {machine}: --devices 2 runs two processes on it"
            )
        if chosen == -1:
            raise UsageError(f"--devices -1 means every GPU, but this machine has {machine}: use --devices 1")
        return accelerator, chosen
    if not wants_gpu:
        return accelerator, chosen
    missing = [number for number in chosen if number >= len(machine.gpus)] if isinstance(chosen, list) else []
    if missing or (isinstance(chosen, int) and chosen > len(machine.gpus)):
        what = f"there is no GPU {missing[0]}" if missing else f"--devices {chosen} asks for more GPUs than there are"
        raise UsageError(f"{what}: this machine has {machine}")
    return accelerator, chosen


def _parse_devices(devices: Any) -> Any:
    """A number, a list of ids or "auto" from how it was typed."""
    advice = "use a number (2), ids (0,1) or auto"
    if isinstance(devices, str):
        text = devices.strip().strip("[]")
        if text == "auto":
            return "auto"
        try:
            ids = [int(part) for part in text.split(",") if part.strip()]
        except ValueError:
            raise UsageError(f"--devices {devices} is not understood: {advice}") from None
        devices = ids if "," in text or "[" in devices else (ids[0] if ids else [])
    if isinstance(devices, list):
        if not devices or any(number < 0 for number in devices) or len(set(devices)) != len(devices):
            raise UsageError(f"--devices {devices} names no device, or one twice: {advice}")
        return devices
    if devices == 0 or devices < -1:
        raise UsageError(f"--devices {devices} leaves nothing to train on: {advice}")
    return devices


def count_devices(machine: Machine, accelerator: str, devices: Any) -> int:
    """On how many devices a Trainer of these settings, as `choose_devices` returns them, works on this machine."""
    if isinstance(devices, list):
        return len(devices)
    if devices not in ("auto", -1):
        return int(devices)
    return max(1, len(machine.gpus)) if accelerator in ("auto", "gpu", "cuda") else 1


def choose_precision(machine: Machine, accelerator: str) -> tuple[str, str]:
    """The fastest precision that trains as well as float32, with the reason, for when none was asked for."""
    if accelerator in ("gpu", "cuda", "auto") and machine.gpus:
        return ("bf16-mixed", "this GPU computes in bf16") if machine.gpu_bf16 else ("32-true", "this GPU has no bf16")
    if accelerator in ("cpu", "auto") and not (machine.mps and accelerator == "auto"):
        if not machine.bf16:
            return "32-true", "this CPU has no bf16"
        gain = probe_bf16()
        if gain < LEAST_GAIN:
            return "32-true", f"bf16 is no faster on this CPU: {gain:.2f} × in a probe"
        return "bf16-mixed", f"{gain:.1f} × as fast as float32 in a probe"
    return "32-true", "the safe choice here"


def probe_bf16() -> float:
    """How many times as fast a convolution, forward and backward, is in bf16 as in float32, both channels_last; 20 ms.

    The best of a few interleaved tries each: a CPU that names the instructions may still be slow at them, or have no
    kernels for them in its torch. One thread, by the time that it has computed: what other processes take from several
    threads, or from the clock on the wall, has made bf16 seem five times as slow as it is.
    """
    import time

    import torch

    own = torch.Generator()  # the run's random numbers must not depend on whether this was asked
    images = torch.rand(32, 32, 16, 16, generator=own).contiguous(memory_format=torch.channels_last).requires_grad_()
    weight = torch.rand(32, 32, 3, 3, generator=own).contiguous(memory_format=torch.channels_last).requires_grad_()
    best = {True: float("inf"), False: float("inf")}
    exact = time.get_clock_info("thread_time").resolution < 1e-4  # not on Windows
    clock = time.thread_time if exact else time.perf_counter
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for attempt in range(6):  # the first chooses kernels
            for bf16 in best:
                started = clock()
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    result = torch.nn.functional.conv2d(images, weight, padding=1)
                result.backward(torch.ones_like(result))
                if attempt:
                    best[bf16] = min(best[bf16], clock() - started)
    finally:
        torch.set_num_threads(threads)
    return best[False] / best[True]


# ---- memory that is free


def free_memory(device: torch.device) -> int | None:
    """Bytes that programs can still get on a device, None where the system does not tell."""
    if device.type != "cpu":
        import torch

        ask = getattr(torch.get_device_module(device), "mem_get_info", None)
        return int(ask(device)[0]) if ask else None
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
