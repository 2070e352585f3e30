"""`cifar-lit devices --check`: train a small net on each device, in its own process with a time limit."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from cifar_lit.cli.processes import child_environment
from cifar_lit.errors import Failure
from cifar_lit.hardware import Machine, choose_precision, detect_machine, resolve_device
from cifar_lit.text import say

if TYPE_CHECKING:
    import torch

LIMIT = 90.0  # seconds for a device, most of them for imports
STEPS, BATCH = 5, 128
HALF = {"bf16-mixed": ("bfloat16",), "16-mixed": ("float16",)}  # further dtypes to check, by default precision
# Largest relative error of a loss. On a CPU it is 1e-7 in float32, 2e-5 in bfloat16 and 3e-6 in float16.
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 1e-2}


def train(device: str, dtype: torch.dtype) -> tuple[list[float], float]:
    """Train a small net for a few steps; return the loss of each step, and images/s after the first step."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False  # its rounding would hide errors
    first, second = nn.Conv2d(3, 64, 3, bias=False), nn.Conv2d(64, 64, 3, stride=2)
    head = nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 10)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    net = nn.Sequential(first, nn.BatchNorm2d(64), nn.GELU(), second, nn.GELU(), *head).to(device, exact)
    images, labels = torch.randn(BATCH, 3, 32, 32).to(device, exact), torch.randint(10, (BATCH,)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(images.device.type, enabled=dtype == torch.float16)
    losses = []
    started = 0.0
    for step in range(STEPS):
        if step == 1:
            started = time.perf_counter()
        with torch.autocast(images.device.type, dtype, enabled=dtype.itemsize == 2):
            loss = nn.functional.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())  # waits for the device
    return losses, BATCH * (STEPS - 1) / (time.perf_counter() - started)


def try_device(device: str) -> str:
    """Return the speed of training on a device; raise Failure if its losses differ from those of the CPU in float64."""
    import torch

    expected, _ = train("cpu", torch.float64)
    kind = device.partition(":")[0]
    precision = "bf16-mixed" if kind == "cpu" else choose_precision(detect_machine(), kind)[0]
    speeds = []
    for name in ("float32", *HALF.get(precision, ())):
        losses, speed = train(device, getattr(torch, name))
        error = max(abs(loss / exact - 1) for loss, exact in zip(losses, expected, strict=True))
        if not error <= TOLERANCE[name]:  # also for nan
            raise Failure(f"wrong losses in {name}: off by {error:.1e}, where {TOLERANCE[name]:.0e} is allowed")
        speeds.append(f"{name} {speed:,.0f} images/s")
    return " · ".join(speeds)


def run_probe(word: str) -> str:
    """Run this module in a new process and return the last line that it prints; raise Failure if it fails.

    word: a device to train on, or "machine" to detect the devices.
    """
    command = [sys.executable, "-m", "cifar_lit.cli.check_devices", word]
    none, pipe, environment = subprocess.DEVNULL, subprocess.PIPE, child_environment()
    process = subprocess.Popen(command, stdin=none, stdout=pipe, stderr=pipe, encoding="utf-8", env=environment)
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        raise Failure(f"no answer in {LIMIT:g} s") from None
    finally:
        process.kill()  # without waiting: a process that hangs in a driver may never end
    if process.returncode > 0 and err.strip():
        raise Failure(err.strip().splitlines()[-1].removeprefix("cifar_lit.errors.Failure: "))
    if process.returncode:
        raise Failure(f"its process ended with exit code {process.returncode}")
    return out.strip().splitlines()[-1]


def check(accelerator: str) -> None:
    """Print a line for each device; raise UsageError for a missing accelerator, Failure if a device cannot train."""
    machine = Machine(**json.loads(run_probe("machine")))
    prefix = "" if accelerator == "auto" else resolve_device(accelerator, machine)
    if machine.unusable:
        say(machine.unusable)
    failed = []
    for device in machine.devices:
        if device.startswith(prefix):
            try:
                say(f"{device}: works · {run_probe(device)}")
            except Failure as failure:
                say(f"{device}: fails · {failure}")
                failed.append(device)
    if failed:
        remedy = "Update or restart the driver, or choose others with --devices or --accelerator cpu."
        raise Failure(f"{', '.join(failed)} cannot train. {remedy}")


if __name__ == "__main__":
    say(json.dumps(vars(detect_machine())) if sys.argv[1] == "machine" else try_device(sys.argv[1]))
