"""From what a user calls a device to what torch calls it, for commands that compute without a Trainer."""

from __future__ import annotations

import re
from typing import NamedTuple

from cifar_lit.errors import UsageError, nearest

KINDS = ("auto", "cpu", "gpu", "cuda", "mps")


class Present(NamedTuple):
    """What a machine has besides its CPU: CUDA or ROCm devices, and whether an Apple GPU."""

    gpus: int
    mps: bool

    def __str__(self) -> str:
        cuda = [f"cuda:{number}" for number in range(self.gpus)]
        return ", ".join(["cpu", *cuda, *(["mps"] if self.mps else [])])


def present() -> Present:
    """What torch finds on this machine."""
    import torch

    return Present(torch.cuda.device_count() if torch.cuda.is_available() else 0, torch.backends.mps.is_available())


def device_named(name: str, machine: Present | None = None) -> str:
    """torch's name of a device: "cpu", "cuda", "cuda:1" or "mps".

    name: auto (the first GPU, else Apple's, else the CPU), cpu, gpu (Apple's where there is no other), cuda, mps; gpu:1 and
    cuda:1 are the second one. machine: this one if not given. Raises UsageError, with what the machine has, for what it has not.
    """
    machine = machine or present()
    found = re.fullmatch(rf"({'|'.join(KINDS)})(?::(\d+))?", name)
    kind, number = (found[1], found[2]) if found else ("", None)
    if number is None and kind in ("auto", "gpu", "cuda") and machine.gpus:
        return "cuda"
    if number is not None and kind in ("gpu", "cuda") and int(number) < machine.gpus:
        return f"cuda:{int(number)}"
    if number in (None, "0") and kind in ("auto", "gpu", "mps") and machine.mps and not (kind == "auto" and number):
        return "mps"
    if number is None and kind in ("auto", "cpu"):
        return "cpu"
    hint = "" if found else nearest(name, KINDS)
    raise UsageError(f"this machine has no device {name!r}: it has {machine}.{hint} auto takes the fastest.")
