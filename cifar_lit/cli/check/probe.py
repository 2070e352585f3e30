"""A process that tries out one thing and says what came of it, as JSON lines: `python -m cifar_lit.cli.check.probe WHAT …`.

`look` says what the machine has; `device KIND NUMBER BF16` tries a device; `group KIND DEVICES NODES` forms the group of
processes that the Trainer would, and tries it. Each try is announced ({"tries"}) before its outcome is said ({"tried"}),
so that one knows where a process stood that was never heard of again.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from torch import Tensor, nn

    from cifar_lit.cli.check.device import Try

STARTING = "starting"  # imports, which take a while on a busy or a cold machine

LONGEST = timedelta(hours=1)  # that processes wait for each other: whoever started this one ends it long before


def say(**what: object) -> None:
    """Prints an object with this process's rank, at once and in one piece, as other ranks print to the same file."""
    rank = int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0)
    os.write(1, (json.dumps({"rank": rank, **what}) + "\n").encode())


def make(tries: Iterable[Try]) -> None:
    """Makes tries one after the other."""
    for name, attempt in tries:
        say(tries=name)
        started = time.perf_counter()
        found = attempt()
        say(tried=name, seconds=time.perf_counter() - started, figure=found.figure, wrong=found.wrong)


def look() -> None:
    """Says what the machine has."""
    from cifar_lit import hardware as machine

    say(machine=asdict(machine.detect_machine()))


def device(kind: str, number: str, bf16: str) -> None:
    """Tries one device. kind: cpu, gpu or mps."""
    say(tries=STARTING)
    import torch

    from cifar_lit.cli.check.device import device_tries

    place: Callable = _as_it_is
    where = torch.device("cpu")
    if kind != "cpu":
        _quieten()
        from lightning.fabric import Fabric
        from lightning.fabric.plugins.environments import LightningEnvironment

        say(tries="waking up")
        fabric = Fabric(accelerator=kind, devices=[int(number)] if kind == "gpu" else 1, plugins=[LightningEnvironment()])
        where, place = fabric.device, fabric.to_device
    torch.backends.cudnn.allow_tf32 = False  # it would round to 10 bits, and hide what is wrong in the others
    make(device_tries(where, place, bf16 == "1"))


def _as_it_is(what: Tensor | nn.Module) -> Tensor | nn.Module:
    return what


def group(kind: str, devices: str, nodes: str) -> None:
    """Forms a group as the Trainer would, from torchrun's processes where there are such, and tries it."""
    say(tries=STARTING)
    _quieten()
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
    from lightning.fabric.strategies import DDPStrategy

    say(tries="connecting")
    environment = TorchElasticEnvironment() if TorchElasticEnvironment.detect() else LightningEnvironment()
    ids = [int(word) for word in devices.split(",")]
    fabric = Fabric(
        accelerator=kind,
        devices=ids if kind == "gpu" else len(ids),
        num_nodes=int(nodes),
        strategy=DDPStrategy(timeout=LONGEST),
        plugins=[environment],
    )
    fabric.launch(_try_group)


def _try_group(fabric: Fabric) -> None:
    import torch.distributed as dist

    from cifar_lit.cli.check.group import group_tries

    try:
        make(group_tries(fabric.global_rank, fabric.world_size, fabric.device))
    finally:
        dist.destroy_process_group()


def _quieten() -> None:
    """So that the last line on stderr is about what went wrong."""
    import lightning.fabric

    logging.getLogger(lightning.fabric.__name__).setLevel(logging.WARNING)


def _follow_parent() -> None:
    """Ends this process when its parent is gone, which holds the other end of its standard input."""

    def follow() -> None:
        os.read(0, 1)  # nothing is ever written to it
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def main(words: list[str]) -> int:
    """Runs a probe; returns 1 when it failed."""
    _follow_parent()
    what, *rest = words
    probes: dict[str, Callable[..., None]] = {"look": look, "device": device, "group": group}
    try:
        probes[what](*rest)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        say(error=f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__)
        return 1
    say(done=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
