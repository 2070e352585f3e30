"""Two machines on one: network namespaces of Linux, each with its own address, joined by a switch that can be unplugged."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NETWORK = "10.77.31"
CLONE_NEWNET = 0x40000000  # of Linux's <sched.h>


def why_not() -> str | None:
    """What this system lacks for namespaces, None when they can be made."""
    if shutil.which("ip") is None:
        return "the command ip (iproute2) is not installed"
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces take root"
    name = f"cifar-lit-try-{os.getpid()}"
    try:
        _ip("netns", "add", name)
    except RuntimeError as error:
        return str(error)
    _ip("netns", "del", name)
    return None


class TwoMachines:
    """Namespaces as `two_machines` makes them; machines are numbered 0 and 1."""

    def __init__(self) -> None:
        *self.names, self.switch = (f"cifar-lit-{os.getpid()}-{what}" for what in ("0", "1", "switch"))

    def address(self, number: int) -> str:
        """A machine's address."""
        return f"{NETWORK}.{number + 1}"

    def shut(self, number: int) -> None:
        """Shuts a machine's own end of the network down: it has no way to anybody, and is told so."""
        _ip("-n", self.names[number], "link", "set", "net", "down")

    def open(self, number: int) -> None:
        """Brings it up again."""
        _ip("-n", self.names[number], "link", "set", "net", "up")

    def plug(self, number: int) -> None:
        """Joins a machine to the network."""
        _ip("-n", self.switch, "link", "set", f"port{number}", "master", "bridge")

    def unplug(self, number: int) -> None:
        """Cuts a machine off: from then on nothing that is sent arrives, and nobody is told."""
        _ip("-n", self.switch, "link", "set", f"port{number}", "nomaster")


def enter(name: str) -> None:
    """Puts this process's network into a machine's; its process number and host name stay."""
    with Path("/run/netns", name).open() as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")


@contextmanager
def two_machines() -> Iterator[TwoMachines]:
    """Two machines and the switch between them, for as long as the context lasts."""
    machines = TwoMachines()
    try:
        for name in (*machines.names, machines.switch):
            _ip("netns", "add", name)
        _ip("-n", machines.switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", machines.switch, "link", "set", "bridge", "up")
        for number, name in enumerate(machines.names):
            _ip("-n", name, "link", "set", "lo", "up")
            _ip(
                "-n",
                name,
                "link",
                "add",
                "net",
                "type",
                "veth",
                "peer",
                "name",
                f"port{number}",
                "netns",
                machines.switch,
            )
            _ip("-n", name, "address", "add", f"{machines.address(number)}/24", "dev", "net")
            _ip("-n", name, "link", "set", "net", "up")
            _ip("-n", machines.switch, "link", "set", f"port{number}", "up")
            machines.plug(number)
        yield machines
    finally:
        for name in (*machines.names, machines.switch):
            with suppress(RuntimeError):
                _ip("netns", "del", name)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
