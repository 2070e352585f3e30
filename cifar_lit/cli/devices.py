"""`cifar-lit devices`: list the devices of this machine or the parameters of a net, or check all devices."""

from __future__ import annotations

from jsonargparse import ArgumentParser, Namespace
from rich.table import Column, Table

from cifar_lit.cli.console import for_tables
from cifar_lit.cli.errors import PARSER_SETTINGS, parsed


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
        from cifar_lit.cli.check_devices import check

        check(settings.accelerator, settings.net or "tudui", settings.width, settings.batch_size)
    elif settings.net:
        _list_parameters(settings)
    else:
        _list_machine()


def _list_machine() -> None:
    import psutil

    from cifar_lit.base.hardware import choose_precision, detect_machine
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
