"""`cifar-lit recipes` and `cifar-lit devices`."""

from __future__ import annotations

from jsonargparse import ArgumentParser, Namespace
from rich.table import Table

from cifar_lit.cli import flags
from cifar_lit.cli.console import for_tables
from cifar_lit.cli.errors import parsed
from cifar_lit.errors import UsageError, nearest

LIMIT = 30.0  # seconds


def list_recipes(words: list[str]) -> None:
    """Prints every recipe with what it reaches and takes, or the file of the one that is named."""
    names = flags.recipe_names()
    wanted = [word for word in words if not word.startswith("-")]
    if words and words != wanted:
        unknown = next(word for word in words if word.startswith("-"))
        if unknown in ("-h", "--help"):
            print("usage: cifar-lit recipes [NAME]\n\nlists the packaged recipes, or prints the settings of one")
            return
        raise UsageError(f"recipes knows no flag {unknown}: use `cifar-lit recipes` or `cifar-lit recipes NAME`")
    if wanted:
        for name in wanted:
            if name not in names:
                raise UsageError(f"no recipe is called {name!r}.{nearest(name, names)} There are {', '.join(names)}.")
            print(flags.recipe_path(name).read_text(), end="")
        return
    table = Table(show_lines=True)
    for column in ("recipe", "what", "reaches", "takes"):
        table.add_column(column)
    for name in names:
        header = flags.recipe_header(flags.recipe_path(name))
        table.add_row(name, header[0].partition(" — ")[2] or header[0], _field(header, "Reaches"), _field(header, "Takes"))
    screen = for_tables()
    screen.print(table)
    screen.print("start one:  python scripts/train.py --recipe NAME\nits settings:  cifar-lit recipes NAME", highlight=False)


def _field(header: list[str], name: str) -> str:
    """What a recipe's header says after `Name:`, with the indented lines that continue it."""
    found: list[str] = []
    for line in header:
        if found and not line.startswith(" "):
            break
        if found or line.startswith(f"{name}:"):
            found.append(line.removeprefix(f"{name}:").strip())
    return " ".join(found)


def list_devices(words: list[str]) -> None:
    """Prints the machine's accelerators with the flags that use them; with --net, every parameter of a net; tries them."""
    parser = ArgumentParser(
        prog="cifar-lit devices",
        description="What this machine has, and how to use it. With --net, every parameter of a net. With --check, each device "
        "and the paths between processes are tried out; under torchrun, those of all its machines.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--net", type=str | None, default=None, help="list the parameters of this net instead")
    parser.add_argument("--width", type=float, default=1.0, help="width multiplier of the net")
    parser.add_argument("--channels", type=int, default=3, help="channels of its images")
    parser.add_argument("--image_size", type=int, default=32, help="height and width of its images")
    parser.add_argument("--num_classes", type=int, default=10, help="number of classes")
    parser.add_argument("--accelerator", type=str, default="auto", help="where the Trainer would put it")
    parser.add_argument("--check", action="store_true", help="try out every device, and processes together")
    parser.add_argument("--limit", type=float, default=LIMIT, help="with --check: seconds to wait for a word from a device")
    parser.add_argument("--devices", type=str | None, default=None, help="with --check: how many, or which, as in fit")
    settings = parsed(parser, words)
    if settings.check and settings.net:
        raise UsageError("--check tries devices, --net lists a net's parameters: leave one of them out")
    if not settings.check and (settings.devices or settings.limit != LIMIT):
        raise UsageError(f"--{'devices' if settings.devices else 'limit'} goes with --check")
    if not 0 < settings.limit < 1e6:
        raise UsageError(f"--limit must be more than 0 seconds, not {settings.limit:g}")
    if settings.check:
        from cifar_lit.cli.check import check

        check(settings.accelerator, settings.devices, settings.limit)
    elif settings.net:
        _list_parameters(settings)
    else:
        _list_machine()


def _list_machine() -> None:
    from cifar_lit.cli.run import versions
    from cifar_lit.hardware import choose_precision, detect_machine

    found = detect_machine()
    table = Table()
    for column in ("accelerator", "what", "memory", "precision by default", "flags"):
        table.add_column(column)
    for number, (name, memory) in enumerate(found.gpus):
        table.add_row(
            f"gpu {number}", name, f"{memory / 2**30:.0f} GiB", choose_precision(found, "gpu")[0], f"--devices {number},"
        )
    if len(found.gpus) > 1:
        table.add_row(
            "all gpus", f"{len(found.gpus)} together", "", choose_precision(found, "gpu")[0], f"--devices {len(found.gpus)}"
        )
    if found.mps:
        table.add_row("mps", "Apple GPU", "shared", "32-true", "--accelerator mps")
    bf16 = "computes in bf16" if found.bf16 else "no bf16 in hardware"
    table.add_row(
        "cpu", f"{found.cpu}, {found.threads} threads, {bf16}", _memory(), choose_precision(found, "cpu")[0], "--accelerator cpu"
    )
    if found.threads > 1:
        table.add_row(
            "cpu twice", "two processes (DDP over gloo)", "", choose_precision(found, "cpu")[0], "--accelerator cpu --devices 2"
        )
    screen = for_tables()
    screen.print(table)
    if not found.gpus:
        reason = "none is visible to it" if found.cuda_build else "this torch is a build for CPUs only"
        screen.print(f"torch finds no GPU: {reason}. CUDA_VISIBLE_DEVICES hides GPUs when set to others.", highlight=False)
    screen.print(" · ".join(f"{name} {number}" for name, number in versions().items()), highlight=False)
    screen.print("try them out, alone and together:  cifar-lit devices --check", highlight=False)


def _memory() -> str:
    import os

    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    except (ValueError, OSError, AttributeError):
        return ""


def _list_parameters(settings: Namespace) -> None:
    from cifar_lit.cli.quiet import quieten

    quieten()
    from lightning.fabric import Fabric

    from cifar_lit.hardware import choose_devices, detect_machine
    from cifar_lit.models.registry import build_net

    accelerator, _ = choose_devices(detect_machine(), settings.accelerator, 1)
    net = build_net(
        settings.net,
        channels=settings.channels,
        image_size=settings.image_size,
        num_classes=settings.num_classes,
        width=settings.width,
    )
    net = Fabric(accelerator=accelerator, devices=1).to_device(net)
    table = Table()
    for column in ("parameter", "shape", "dtype", "count", "device"):
        table.add_column(column, justify="right" if column == "count" else "left")
    total = 0
    for name, parameter in net.named_parameters():
        total += parameter.numel()
        shape = "×".join(map(str, parameter.shape))
        table.add_row(name, shape, str(parameter.dtype).removeprefix("torch."), f"{parameter.numel():,}", str(parameter.device))
    screen = for_tables()
    screen.print(table)
    screen.print(
        f"{settings.net}: {total:,} parameters, {total * 4 / 2**20:.1f} MiB in float32\n"
        "A net and its images must be on one device: the Trainer moves both, so that torch's error\n"
        "“Expected all tensors to be on the same device” cannot occur; in code of your own, batch.to(net_device) mends it.",
        highlight=False,
    )
