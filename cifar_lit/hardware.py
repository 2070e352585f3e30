"""What this machine has, and whether it has what a user asks for."""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cifar_lit.errors import UsageError, nearest

if TYPE_CHECKING:
    import torch

MAX_FLOATS = 1 << 28  # of images that something is computed of before a training, which may be large: a GB of float32
ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps", "tpu", "hpu")  # the Trainer's names
DEVICE_NAMES = ("auto", "cpu", "gpu", "cuda", "mps")  # of commands that compute without a Trainer
MIN_BF16_GAIN = 0.9  # in the probe; where bf16 pays it is 1.5 and more, so that noise does not decide
# Limits for the busy waiting of idle OpenMP threads: iterations (GNU), milliseconds (LLVM and Intel). See `limit_busy_waiting`.
SPIN_LIMITS = {"GOMP_SPINCOUNT": "2000", "KMP_BLOCKTIME": "1"}
SPIN_SETTINGS = {*SPIN_LIMITS, "OMP_WAIT_POLICY", "KMP_LIBRARY"}


@dataclass(frozen=True)
class Machine:
    """The devices that torch can use here.

    Args:
        threads: how many of the CPU's threads this process may use.
        bf16: matrix work in bfloat16 is in the CPU's hardware (AVX512-BF16, AMX); elsewhere it is slower than float32.
        gpus: name and memory in bytes of each CUDA or ROCm device.
        mps: there is an Apple GPU.
        cuda_build: torch was built for GPUs at all.
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
            return f"GPUs {', '.join(f'{number} {name}' for number, (name, _) in enumerate(self.gpus))}"
        return "an Apple GPU (mps)" if self.mps else f"no GPU, a CPU with {self.threads} threads"

    @property
    def devices(self) -> list[str]:
        """torch's names of all devices."""
        return ["cpu", *(f"cuda:{number}" for number in range(len(self.gpus))), *(["mps"] if self.mps else [])]

    def kind(self, accelerator: str) -> str:
        """gpu (CUDA or ROCm), mps or cpu, whichever an accelerator means here; what there is not stays as it is called."""
        if accelerator in ("auto", "gpu", "cuda") and self.gpus:
            return "gpu"
        if accelerator in ("auto", "gpu", "mps") and self.mps:
            return "mps"
        return "cpu" if accelerator == "auto" else accelerator


def core_count() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def limit_busy_waiting(sleep_at_once: bool = False) -> None:
    """Limit how long idle OpenMP threads spin before they sleep, unless the user has set it. Call before importing torch.

    By default they keep their cores busy for milliseconds after each operation, which slows other processes down.

    sleep_at_once: do not spin at all, in place of an earlier call's limit.
    """
    current = {name: os.environ[name] for name in SPIN_SETTINGS if name in os.environ}
    if current in ({}, SPIN_LIMITS):
        os.environ.update(dict.fromkeys(SPIN_LIMITS, "0") if sleep_at_once else SPIN_LIMITS)


def detect_machine() -> Machine:
    """This machine, as torch sees it."""
    import platform

    import torch

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    instructions = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_properties(number) for number in range(count)]
    return Machine(
        cpu=next(names, "") or platform.processor() or platform.machine(),  # processor() starts a program
        threads=core_count(),
        bf16=any(supported is not None and supported() for supported in instructions),
        gpus=tuple((gpu.name, gpu.total_memory) for gpu in gpus),
        gpu_bf16=bool(gpus) and torch.cuda.is_bf16_supported(including_emulation=False),
        mps=torch.backends.mps.is_available(),
        cuda_build=torch.backends.cuda.is_built(),
    )


# ---- devices


def resolve_device(name: str, machine: Machine | None = None) -> str:
    """torch's name of a device ("cpu", "cuda", "cuda:1", "mps"), for commands that compute without a Trainer.

    Args:
        name: auto (the first GPU, else Apple's, else the CPU), cpu, gpu (Apple's where there is no other), cuda or mps; gpu:1 and
            cuda:1 are the second one.
        machine: this one if not given.

    Raises:
        UsageError: the machine has no such device; it says what the machine has.
    """
    if name == "cpu":
        return name  # without waking GPUs up
    machine = machine or detect_machine()
    match = re.fullmatch(rf"({'|'.join(DEVICE_NAMES)})(?::(\d+))?", name)
    if match and not (match[1] in ("auto", "cpu") and match[2]):
        kind, number = machine.kind(match[1]), int(match[2] or 0)
        if kind == "gpu" and number < len(machine.gpus):
            return f"cuda:{number}" if match[2] else "cuda"
        if kind == "cpu" or (kind == "mps" and machine.mps and not number):
            return kind
    hint = "" if match else nearest(name, DEVICE_NAMES)
    raise UsageError(
        f"this machine has no device {name!r}: it has {', '.join(machine.devices)}.{hint} auto takes the fastest."
    )


def choose_devices(machine: Machine, accelerator: str, devices: Any) -> tuple[str, Any]:
    """Accelerator and devices as the Trainer takes them, checked against the machine.

    devices: a number, a list of ids, or such as a string (`2`, `0,1`, `[1]`, `auto`, `-1` for all). Raises UsageError where the
    machine lacks some of it; it says what the machine has.
    """
    if accelerator not in ACCELERATORS:
        hint = " Choose one of several GPUs with --devices, such as --devices 0," if ":" in accelerator else ""
        raise UsageError(f"no accelerator is called {accelerator!r}.{nearest(accelerator, ACCELERATORS)}{hint}")
    kind = machine.kind(accelerator)
    if (kind in ("gpu", "cuda") and not machine.gpus) or (kind == "mps" and not machine.mps):
        build = "" if machine.cuda_build else ", and this torch is a build for CPUs only"
        reason = ", not Apple's" if kind == "mps" else build
        raise UsageError(f"this machine has {machine}{reason}: leave --accelerator out, or use --accelerator cpu")
    chosen, count = _parse_devices(devices), len(machine.gpus)
    if kind == "cpu" and (isinstance(chosen, list) or chosen == -1):
        raise UsageError(
            f"--devices {devices} names GPUs, but this machine has {machine}: --devices 2 runs two processes on it"
        )
    if kind == "gpu" and chosen != "auto" and (max(chosen) >= count if isinstance(chosen, list) else chosen > count):
        raise UsageError(f"--devices {devices} asks for more GPUs than there are: this machine has {machine}")
    return accelerator, chosen


def _parse_devices(devices: Any) -> Any:
    """A number, a list of ids or "auto" from how it was typed."""
    text = str(devices).replace(" ", "")
    if text == "auto":
        return text
    if re.fullmatch(r"-1|[1-9]\d*", text):
        return int(text)
    ids = [int(part) for part in re.findall(r"\d+", text)]
    if re.fullmatch(r"\[\d+(,\d+)*,?\]|\d+,(\d+,)*\d*", text) and len(set(ids)) == len(ids):
        return ids
    kind = text.partition(":")[0]
    hint = f" Did you mean --accelerator {kind}?" if kind in ACCELERATORS else ""
    raise UsageError(f"--devices {devices} names no device, or one twice: use a number (2), ids (0,1) or auto.{hint}")


def count_devices(machine: Machine, accelerator: str, devices: Any) -> int:
    """On how many devices a Trainer of these settings, as `choose_devices` returns them, works on this machine."""
    if isinstance(devices, list):
        return len(devices)
    if devices not in ("auto", -1):
        return int(devices)
    return len(machine.gpus) if machine.kind(accelerator) == "gpu" else 1


# ---- precision


def choose_precision(machine: Machine, accelerator: str) -> tuple[str, str]:
    """Return the default precision, the fastest that trains as well as float32, and the reason for it."""
    kind = machine.kind(accelerator)
    if kind == "gpu" and machine.gpus:
        if machine.gpu_bf16:
            return "bf16-mixed", "this GPU supports bfloat16"
        return "32-true", "this GPU does not support bfloat16"
    if kind != "cpu":
        return "32-true", "the safe choice here"
    if not machine.bf16:
        return "32-true", "this CPU does not support bfloat16"
    gain = probe_bf16()
    if gain < MIN_BF16_GAIN:
        return "32-true", f"measured: bfloat16 runs at {gain:.2f} × its speed on this CPU"
    return "bf16-mixed", f"measured: {gain:.1f} × as fast as float32 on this CPU"


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
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for attempt in range(6):  # the first chooses kernels
            for bf16 in best:
                started = time.thread_time()
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    result = torch.nn.functional.conv2d(images, weight, padding=1)
                result.backward(torch.ones_like(result))
                if attempt:
                    best[bf16] = min(best[bf16], time.thread_time() - started)
    finally:
        torch.set_num_threads(threads)
    return best[False] / max(best[True], 1e-9)  # Windows counts in 16 ms


# ---- The C library's memory, which on a CPU decides over a fifth of a training step's time.

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_… of glibc's malloc.h
MAX_KEPT_BLOCK = 2**30  # bytes
MIN_RETURNED_BLOCK = 2**17  # bytes; glibc's own
MAX_OLD_THRESHOLD = 32 * 2**20  # bytes: glibc before 2.35 refuses a higher one


def keep_freed_memory() -> bool:
    """Lets this process keep the memory that it frees, for the next step; returns whether the C library can be told so.

    By itself, glibc hands large blocks back to the system, as soon as a tensor is freed, and the system clears each of their
    pages anew when the next step asks for them.
    The process is then as large as it was at its peak until it ends. Other libraries (macOS, Windows, musl) stay as they are.
    """
    kept = _mallopt(_MMAP_THRESHOLD, MAX_KEPT_BLOCK) or _mallopt(_MMAP_THRESHOLD, MAX_OLD_THRESHOLD)
    return _mallopt(_TRIM_THRESHOLD, 2**31 - 1) and kept


def return_freed_memory() -> None:
    """Has this process hand large blocks back to the system as soon as they are freed, also where it was told to keep them.

    For processes that make blocks for others: before 2.38, glibc often fails to use a freed block for an aligned one of the same
    size, as torch's are, so that what is kept grows with every block.
    """
    _mallopt(_MMAP_THRESHOLD, MIN_RETURNED_BLOCK)
    _mallopt(_TRIM_THRESHOLD, MIN_RETURNED_BLOCK)


def _mallopt(parameter: int, value: int) -> bool:
    """Sets a parameter of glibc's; whether that was possible."""
    try:
        return bool(ctypes.CDLL(None).mallopt(parameter, value))
    except (AttributeError, OSError, TypeError):
        return False


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
