"""Detect devices, validate the requested ones, and choose the precision."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from cifar_lit.base.errors import UsageError

BF16_GAIN = 0.9  # speed relative to float32; real gains are 1.5 and more, so noise does not matter
# Spin limits of idle OpenMP threads: iterations (GNU), milliseconds (LLVM and Intel).
SPIN_LIMITS = {"GOMP_SPINCOUNT": "2000", "KMP_BLOCKTIME": "1"}
# Turing GPUs without tensor cores, where float16 convolutions of cuDNN return NaN (pytorch/pytorch#77955).
NO_TENSOR_CORES = re.compile(r"GTX 16\d\d|MX[45]50|\bT(400|500|550|600|1000|1200|2000)\b")
SPIN_SETTINGS = {*SPIN_LIMITS, "OMP_WAIT_POLICY", "KMP_LIBRARY"}
Devices = int | str | list[int]  # a value of --devices


@dataclass(frozen=True)
class Machine:
    """The devices that torch can use on this machine."""

    cpu: str  # name
    threads: int  # CPU threads that this process may use
    bf16: bool  # whether the CPU has bfloat16 instructions (AVX512-BF16, AMX); without them, bfloat16 is slow
    gpus: tuple[tuple[str, int], ...] = ()  # name and bytes of each CUDA or ROCm device that this torch can use
    gpu_bf16: bool = False  # whether all GPUs have bfloat16 instructions
    gpu_fp16: bool = False  # whether float16 is fast on all GPUs
    mps: bool = False  # whether there is an Apple GPU
    cuda_build: bool = True  # whether this torch was built for GPUs

    def __str__(self) -> str:
        if self.gpus:
            names = [f"{number} {name}" for number, (name, _) in enumerate(self.gpus)]
            return f"GPUs {', '.join(names)}"
        if self.mps:
            return "an Apple GPU (mps)"
        return f"no GPU, only a CPU with {self.threads} threads"

    @property
    def devices(self) -> list[str]:
        """Names of all devices, as torch uses them."""
        names = ["cpu", *(f"cuda:{number}" for number in range(len(self.gpus)))]
        if self.mps:
            names.append("mps")
        return names

    def kind(self, accelerator: str) -> str:
        """Resolve an accelerator to gpu (CUDA or ROCm), mps or cpu; return an unavailable accelerator unchanged."""
        if accelerator in ("auto", "gpu", "cuda") and self.gpus:
            return "gpu"
        if accelerator in ("auto", "gpu", "mps") and self.mps:
            return "mps"
        if accelerator == "auto":
            return "cpu"
        return accelerator


def core_count() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def limit_busy_waiting(sleep_at_once: bool = False) -> None:
    """Limit how long idle OpenMP threads spin, unless the user has set it. Call it before importing torch.

    By default, threads spin for milliseconds after each operation, which slows down other processes.
    With `sleep_at_once`, they do not spin at all, even if an earlier call set a limit.
    """
    current = {name: os.environ[name] for name in SPIN_SETTINGS if name in os.environ}
    if current not in ({}, SPIN_LIMITS):
        return
    os.environ.update(SPIN_LIMITS)
    if sleep_at_once:
        os.environ.update(dict.fromkeys(SPIN_LIMITS, "0"))


def has_amx() -> bool:
    """Return whether the CPU has Intel's matrix units."""
    import torch

    return torch.cpu._is_amx_tile_supported()  # no public name


def detect_machine() -> Machine:
    """Return the devices of this machine."""
    import torch

    gpus = []
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    # `torch.cuda.is_bf16_supported` looks at one GPU only. ROCm GPUs have no compute capability; they support bfloat16.
    oldest = min((gpu.major for gpu in gpus), default=0)
    if torch.version.hip:
        oldest = 9
    lacks_cores = [gpu.name for gpu in gpus if NO_TENSOR_CORES.search(gpu.name)]
    return Machine(
        cpu=_cpu_name(),
        threads=core_count(),
        bf16=torch.cpu._is_avx512_bf16_supported() or has_amx(),  # no public name
        gpus=tuple((gpu.name, gpu.total_memory) for gpu in gpus),
        gpu_bf16=oldest >= 8,
        gpu_fp16=oldest >= 7 and not lacks_cores,
        mps=torch.backends.mps.is_available(),
        cuda_build=torch.backends.cuda.is_built(),
    )


def _cpu_name() -> str:
    import platform

    info = Path("/proc/cpuinfo")
    if info.is_file():
        match = re.search(r"^model name\s*:\s*(.+?)\s*$", info.read_text(encoding="utf-8"), re.MULTILINE)
        if match:
            return match[1]
    return platform.processor() or platform.machine()  # processor() starts a process


def processor(accelerator: str) -> str:
    """Return the kind of processor that trains: two of the same kind give the same bits with the same software."""
    import torch

    if accelerator == "gpu":
        return torch.cuda.get_device_name()
    units = torch.backends.cpu.get_cpu_capability()
    if has_amx():
        units += ", AMX"
    return f"{_cpu_name()} ({units})"


# ---- devices


def resolve_device(name: str) -> str:
    """Return torch's name of a device ("cpu", "cuda", "cuda:1", "mps"), for commands without a Trainer.

    Args:
        name: auto (a CUDA GPU, else an Apple GPU, else the CPU), cpu, gpu (also an Apple GPU), cuda or mps; gpu:1 and
            cuda:1 are the second GPU.

    Raises:
        UsageError: if the machine has no such device.
    """
    if name == "cpu":
        return name  # without initialising CUDA
    machine = detect_machine()
    accelerator, colon, number = name.partition(":")
    device = machine.kind(accelerator).replace("gpu", "cuda") + colon + number
    names = list(machine.devices)
    if machine.gpus:
        names.append("cuda")
    if device not in names:
        raise UsageError(f"this machine has no device {name!r}: it has {', '.join(machine.devices)}")
    return device


def choose_devices(machine: Machine, accelerator: str, devices: Devices) -> Devices:
    """Return the devices for the Trainer; raise UsageError for invalid values and missing devices."""
    kind = machine.kind(accelerator)
    missing = []
    if not machine.gpus:
        missing += ["gpu", "cuda"]
    if not machine.mps:
        missing.append("mps")
    if kind in missing:
        build = ""
        if not machine.cuda_build:
            build = ", and this torch is a build for CPUs only"
        raise UsageError(f"this machine has {machine}{build}: leave --accelerator out, or use --accelerator cpu")
    parsed = parse_devices(devices)
    if kind == "cpu" and (isinstance(parsed, list) or parsed == -1):
        fault = f"--devices {devices} selects GPUs, but the accelerator is the CPU (this machine has {machine})"
        raise UsageError(f"{fault}. Use a number: --devices 2 runs two processes")
    needed_gpus = 1  # for auto
    if isinstance(parsed, list):
        needed_gpus = max(parsed) + 1
    elif isinstance(parsed, int):
        needed_gpus = parsed
    if kind == "gpu" and needed_gpus > len(machine.gpus):
        fault = f"--devices {devices}: this machine has {machine}"
        raise UsageError(f"{fault}. Use --devices {len(machine.gpus)}, or leave it out")
    return parsed


def parse_devices(devices: Devices) -> Devices:
    """Return a number (-1 for all), a list of ids or "auto" from a value of --devices; raise UsageError for others."""
    text = str(devices).replace(" ", "")
    if text == "auto":
        return text
    if re.fullmatch(r"-1|[1-9]\d*", text):
        return int(text)
    if re.fullmatch(r"\[\d+(,\d+)*,?\]|\d+,(\d+,)*\d*", text):
        return [int(part) for part in re.findall(r"\d+", text)]
    raise UsageError(f"--devices {devices} is not a valid device list: use a number (2), ids (0,1) or auto")


def is_one_device(devices: Devices) -> bool:
    """Return whether a value of --devices is one device on every machine: 1, or a single id."""
    parsed = parse_devices(devices)
    if isinstance(parsed, list):
        return len(parsed) == 1
    return parsed == 1


def count_devices(machine: Machine, accelerator: str, devices: Devices) -> int:
    """Return the number of devices for settings returned by `choose_devices`."""
    if isinstance(devices, list):
        return len(devices)
    if devices not in ("auto", -1):
        return int(devices)
    if machine.kind(accelerator) == "gpu":
        return len(machine.gpus)
    return 1


# ---- precision


def choose_precision(machine: Machine, accelerator: str) -> tuple[str, str]:
    """Return the default precision, which is the fastest that trains as well as float32, and the reason for it."""
    kind = machine.kind(accelerator)
    if kind == "gpu":
        if machine.gpu_bf16:
            return "bf16-mixed", "bfloat16 is fast on this GPU"
        if machine.gpu_fp16:
            return "16-mixed", "float16 is fast on this GPU, bfloat16 is not"
    if kind != "cpu":
        return "32-true", "the safe choice here"
    if not machine.bf16:
        return "32-true", "this CPU does not support bfloat16"
    gain = probe_bf16()
    if gain < BF16_GAIN:
        return "32-true", f"measured: bfloat16 runs at {gain:.2f} × its speed on this CPU"
    return "bf16-mixed", f"measured: {gain:.1f} × as fast as float32 on this CPU"


def probe_bf16() -> float:
    """Return the speed of bfloat16 relative to float32 on this CPU, measured on a convolution in 20 ms.

    A CPU may execute the bfloat16 instructions slowly, or torch may lack kernels for them. Each speed is the best of
    five interleaved measurements in CPU time of one thread. In wall-clock time, other processes once made bfloat16 look
    five times slower than it is.
    """
    import time

    import torch

    rng = torch.Generator()  # leaves the random numbers of the run unchanged
    images = torch.rand(32, 32, 16, 16, generator=rng).contiguous(memory_format=torch.channels_last).requires_grad_()
    weight = torch.rand(32, 32, 3, 3, generator=rng).contiguous(memory_format=torch.channels_last).requires_grad_()
    best = {True: float("inf"), False: float("inf")}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for attempt in range(6):  # the first attempt selects kernels and is not measured
            for bf16 in best:
                started = time.thread_time()
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    result = torch.nn.functional.conv2d(images, weight, padding=1)
                result.backward(torch.ones_like(result))
                if attempt:
                    best[bf16] = min(best[bf16], time.thread_time() - started)
    finally:
        torch.set_num_threads(threads)
    return best[False] / max(best[True], 1e-9)  # Windows counts in steps of 16 ms
