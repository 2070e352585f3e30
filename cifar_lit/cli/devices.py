"""`cifar-lit devices`: list the devices of this machine or the parameters of a net, or check all devices."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace
from rich.table import Column, Table

from cifar_lit.base.command_line import PARSER_SETTINGS, parsed
from cifar_lit.base.errors import Failure
from cifar_lit.base.hardware import choose_precision, detect_machine, resolve_device
from cifar_lit.base.text import say
from cifar_lit.cli.console import for_tables

if TYPE_CHECKING:
    import torch


def list_devices(argv: list[str]) -> None:
    """List the devices with their flags; with --net, the parameters of a net; with --check, training steps of a net."""
    description = "List the devices of this machine with the flags that select them, or the parameters of a net."
    parser = ArgumentParser(prog="cifar-lit devices", description=description, **PARSER_SETTINGS)
    add = parser.add_argument
    add("--net", type=str | None, default=None, help="list the parameters of this net")
    add("--width", type=float, default=1.0, help="width multiplier of the net")
    add("--channels", type=int, default=3, help="channels of its images")
    add("--image_size", type=int, default=32, help="height and width of its images")
    add("--num_classes", type=int, default=10, help="number of classes")
    add("--check", action="store_true", help="time the same training steps of a net (tudui) on each device")
    add("--accelerator", type=str, default="auto", help="with --check: auto, cpu, gpu or mps")
    add("--batch_size", type=int, default=64, help="with --check: images of a step")
    settings = parsed(parser, argv)
    if settings.check:
        check(settings.accelerator, settings.net or "tudui", settings.width, settings.batch_size)
    elif settings.net:
        _list_parameters(settings)
    else:
        _list_machine()


def _list_machine() -> None:
    import psutil

    from cifar_lit.run.results import versions

    machine = detect_machine()
    choices = {kind: choose_precision(machine, kind) for kind in ("gpu", "mps", "cpu")}
    if not machine.gpus:
        del choices["gpu"]
    if not machine.mps:
        del choices["mps"]
    table = Table("accelerator", "device", "memory", "precision", "flags")
    for number, (name, memory) in enumerate(machine.gpus):
        table.add_row(f"gpu {number}", name, f"{memory / 2**30:.0f} GiB", choices["gpu"][0], f"--devices {number},")
    if machine.mps:
        table.add_row("mps", "Apple GPU", "shared", choices["mps"][0], "--accelerator mps")
    ram = f"{psutil.virtual_memory().total / 2**30:.0f} GiB"
    bf16 = "bf16" if machine.bf16 else "no bf16"
    cpu = f"{machine.cpu}, {machine.threads} threads, {bf16} in hardware"
    table.add_row("cpu", cpu, ram, choices["cpu"][0], "--accelerator cpu")
    console = for_tables()
    console.print(table)
    for kind, (precision, reason) in choices.items():
        console.print(f"{kind}: {precision} by default ({reason})")
    console.print("--devices 2 uses two GPUs, or two processes on the CPU (DDP)")
    if not machine.gpus:
        reason = "this build is CPU-only"
        if machine.cuda_build:
            reason = "none is visible (CUDA_VISIBLE_DEVICES can hide them)"
        console.print(f"torch finds no GPU: {reason}")
    console.print(" · ".join(f"{name} {number}" for name, number in versions().items()))
    console.print("test them: cifar-lit devices --check")


def _list_parameters(settings: Namespace) -> None:
    from cifar_lit.models.registry import build_net

    net = build_net(
        settings.net,
        channels=settings.channels,
        image_size=settings.image_size,
        num_classes=settings.num_classes,
        width=settings.width,
    )
    table = Table("parameter", "shape", "dtype", Column("count", justify="right"))
    for name, parameter in net.named_parameters():
        shape, dtype = "×".join(map(str, parameter.shape)), str(parameter.dtype).removeprefix("torch.")
        table.add_row(name, shape, dtype, f"{parameter.numel():,}")
    total = sum(parameter.numel() for parameter in net.parameters())
    console = for_tables()
    console.print(table)
    console.print(f"{settings.net}: {total:,} parameters, {total * 4 / 2**20:.1f} MiB in float32")


# ---- --check: the same training steps on each device, in its own process with a time limit

FOLDER = Path(__file__).parents[2]  # the package lies below
LIMIT = 90.0  # seconds for a device, most of them for imports
CHECKED, TIMED = 3, 50  # steps
SECONDS = 3.0  # fewer timed steps on a slow device
HALF = {"bf16-mixed": ("bfloat16",), "16-mixed": ("float16",)}  # further dtypes to check, by default precision
# Largest relative error of a loss. On a CPU it is 1e-7 in float32, 2e-5 in bfloat16 and 3e-6 in float16.
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 1e-2}


def check(accelerator: str, net: str, width: float, batch_size: int) -> None:
    """Print a row for each device; raise UsageError for a missing accelerator, Failure if a device cannot train."""
    machine = detect_machine()
    prefix = "" if accelerator == "auto" else resolve_device(accelerator, machine)
    table = Table("device", "precision", Column("images/s", justify="right"), Column("× cpu", justify="right"))
    fastest_on_cpu = None
    failed = []
    for device in machine.devices:
        if not device.startswith(prefix):
            continue
        try:
            speeds = run_probe(device, {"net": net, "width": width, "batch_size": batch_size})
        except Failure as failure:
            table.add_row(device, f"fails: {failure}")
            failed.append(device)
            continue
        if device == "cpu":
            fastest_on_cpu = max(speeds.values())
        for precision, speed in speeds.items():
            ratio = f"{speed / fastest_on_cpu:.2f}" if fastest_on_cpu else ""
            table.add_row(device, precision, f"{speed:,.0f}", ratio)
    console = for_tables()
    console.print(f"training steps of {net}, width {width:g}, batches of {batch_size} images of 32 × 32 pixels")
    console.print(table)
    if failed:
        remedy = "Update or restart the driver, or choose others with --devices or --accelerator cpu."
        raise Failure(f"{', '.join(failed)} cannot train. {remedy}")


def run_probe(device: str, settings: Mapping[str, object]) -> dict[str, float]:
    """Call `try_device` in a new process and return its speeds; raise Failure if it fails or hangs."""
    command = [sys.executable, "-m", "cifar_lit.cli.devices", device, json.dumps(settings)]
    try:
        probe = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=FOLDER, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        raise Failure(f"no answer in {LIMIT:g} s") from None
    if probe.returncode:
        lines = ["", *probe.stderr.strip().splitlines()]
        raise Failure(f"exit code {probe.returncode}. {lines[-1].removeprefix('cifar_lit.base.errors.Failure: ')}")
    speeds: dict[str, float] = json.loads(probe.stdout.strip().splitlines()[-1])
    return speeds


def try_device(device: str, net: str, width: float, batch_size: int) -> dict[str, float]:
    """Return images/s by dtype; raise Failure if the losses differ from those of the CPU in float64."""
    import torch

    expected = list(islice(train("cpu", torch.float64, net, width, batch_size), CHECKED))
    precision, _ = choose_precision(detect_machine(), device.partition(":")[0])
    speeds = {}
    for name in ("float32", *HALF.get(precision, ())):
        losses = train(device, getattr(torch, name), net, width, batch_size)
        error = max(abs(float(next(losses) / exact) - 1) for exact in expected)
        if not error <= TOLERANCE[name]:  # also for nan
            raise Failure(f"wrong losses in {name}: off by {error:.1e}, where {TOLERANCE[name]:.0e} is allowed")
        speeds[name] = batch_size * steps_per_second(losses)
    return speeds


def train(device: str, dtype: torch.dtype, net: str, width: float, batch_size: int) -> Iterator[torch.Tensor]:
    """Train a net on drawn numbers without end; yield the loss of each step."""
    import torch
    from torch.nn.functional import cross_entropy

    from cifar_lit.models.registry import build_net

    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False  # its rounding would hide errors
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    model = build_net(net, channels=3, image_size=32, num_classes=10, width=width).to(device, exact)
    images = torch.randn(batch_size, 3, 32, 32).to(device, exact)
    labels = torch.randint(10, (batch_size,)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(images.device.type, enabled=dtype == torch.float16)
    while True:
        with torch.autocast(images.device.type, dtype, enabled=dtype.itemsize == 2):
            loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield loss.detach()


def steps_per_second(losses: Iterator[torch.Tensor]) -> float:
    """Return the number of further steps per second of `train`."""
    started = time.perf_counter()
    steps = 0
    while steps < TIMED and time.perf_counter() < started + SECONDS:
        loss = next(losses)
        steps += 1
    loss.item()  # waits for the device
    return steps / (time.perf_counter() - started)


if __name__ == "__main__":
    say(json.dumps(try_device(sys.argv[1], **json.loads(sys.argv[2]))))
