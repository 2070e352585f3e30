"""`cifar-lit devices`: list the devices of this machine, or check that each of them trains."""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser
from rich.table import Column, Table

from cifar_lit.base.command_line import PARSER_SETTINGS, parsed
from cifar_lit.base.errors import Failure, first_line
from cifar_lit.base.hardware import choose_precision, detect_machine
from cifar_lit.base.text import note
from cifar_lit.cli.console import for_tables

if TYPE_CHECKING:
    import torch

CHECKED, TIMED = 3, 30  # steps
LIMIT = 300  # seconds for a device
BATCH = 64
HALF = {"bf16-mixed": ("bfloat16",), "16-mixed": ("float16",)}  # further dtypes to check, by default precision
# Largest relative error of a loss. On a CPU it is 1e-7 in float32, 2e-5 in bfloat16 and 3e-6 in float16.
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 1e-2}


def list_devices(argv: list[str]) -> None:
    """List the devices with their flags; with --check, train a few steps on each."""
    description = "List the devices of this machine with the flags that select them."
    parser = ArgumentParser(prog="cifar-lit devices", description=description, **PARSER_SETTINGS)
    parser.add_argument("--check", action="store_true", help="check and time the same training steps on each device")
    if parsed(parser, argv).check:
        check()
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
    table.add_row("cpu", f"{machine.cpu}, {machine.threads} threads", ram, choices["cpu"][0], "--accelerator cpu")
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


def check() -> None:
    """Print rows for each device; raise Failure if a device cannot train. A driver that hangs ends the process."""
    table = Table("device", "precision", Column("images/s", justify="right"), Column("× cpu", justify="right"))
    failed, cpu = [], float("nan")
    for device in detect_machine().devices:
        note(f"checking {device}: this ends after {LIMIT} s if the driver hangs")
        faulthandler.dump_traceback_later(LIMIT, exit=True, file=2)
        try:
            speeds = try_device(device)
        except RuntimeError as error:
            table.add_row(device, f"fails: {first_line(error)}")
            failed.append(device)
            continue
        if device == "cpu":  # the first one
            cpu = max(speeds.values())
        for precision, speed in speeds.items():
            table.add_row(device, precision, f"{speed:,.0f}", f"{speed / cpu:.1f}")
    faulthandler.cancel_dump_traceback_later()
    console = for_tables()
    console.print(f"training steps of the net tudui with batches of {BATCH} images of 32 × 32 pixels")
    console.print("× cpu: speed as a multiple of the CPU's highest", table, sep="\n")
    if failed:
        remedy = "Update or restart the driver, or choose others with --devices or --accelerator cpu."
        raise Failure(f"{', '.join(failed)} cannot train. {remedy}")


def try_device(device: str) -> dict[str, float]:
    """Return images/s by dtype; raise Failure if the losses differ from those of the CPU in float64."""
    import torch

    expected = list(islice(train("cpu", torch.float64), CHECKED))
    precision, _ = choose_precision(detect_machine(), device.partition(":")[0])
    speeds = {}
    for name in ("float32", *HALF.get(precision, ())):
        losses = train(device, getattr(torch, name))
        error = max(abs(float(next(losses) / exact) - 1) for exact in expected)
        if not error <= TOLERANCE[name]:  # also for nan
            raise Failure(f"wrong losses in {name}: off by {error:.1e}, where {TOLERANCE[name]:.0e} is allowed")
        started = time.perf_counter()
        for loss in islice(losses, TIMED):
            last = loss
        last.item()  # waits for the device
        speeds[name] = BATCH * TIMED / (time.perf_counter() - started)
    return speeds


def train(device: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Train a net on drawn numbers without end; yield the loss of each step."""
    import torch
    from torch.nn.functional import cross_entropy

    from cifar_lit.models.registry import build_net

    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False  # its rounding would hide errors
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    model = build_net("tudui", channels=3, image_size=32, num_classes=10).to(device, exact)
    images = torch.randn(BATCH, 3, 32, 32).to(device, exact)
    labels = torch.randint(10, (BATCH,)).to(device)
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
