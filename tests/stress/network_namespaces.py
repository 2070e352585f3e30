"""Two simulated machines: Linux network namespaces with their own addresses, connected by a switch."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NETWORK = "10.77.31"
CLONE_NEWNET = 0x40000000  # Linux's <sched.h>


def why_not() -> str | None:
    """Return the reason why this system cannot create namespaces, or None."""
    if shutil.which("ip") is None:
        return "the command ip (iproute2) is not installed"
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces require root"
    name = f"cifar-lit-try-{os.getpid()}"
    try:
        _ip(f"netns add {name}")
    except RuntimeError as error:
        return str(error)
    _ip(f"netns del {name}")
    return None


class TwoMachines:
    """The namespaces of machines 0 and 1 and of the switch."""

    def __init__(self) -> None:
        *self.names, self.switch = (f"cifar-lit-{os.getpid()}-{what}" for what in ("0", "1", "switch"))

    def address(self, number: int) -> str:
        """Return the address of a machine."""
        return f"{NETWORK}.{number + 1}"

    def shut(self, number: int) -> None:
        """Bring a machine's own interface down. Its system reports errors."""
        _ip(f"-n {self.names[number]} link set net down")

    def open(self, number: int) -> None:
        """Bring a machine's own interface up again."""
        _ip(f"-n {self.names[number]} link set net up")

    def plug(self, number: int) -> None:
        """Connect a machine to the switch."""
        _ip(f"-n {self.switch} link set port{number} master bridge")

    def unplug(self, number: int) -> None:
        """Disconnect a machine from the switch. Packets are lost without an error."""
        _ip(f"-n {self.switch} link set port{number} nomaster")


def enter(name: str) -> None:
    """Move this process to a machine's network; process numbers and host name are unchanged."""
    with Path("/run/netns", name).open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")


@contextmanager
def two_machines() -> Iterator[TwoMachines]:
    """Create two machines and the switch between them for the duration of the context."""
    machines = TwoMachines()
    switch = machines.switch
    try:
        for name in (*machines.names, switch):
            _ip(f"netns add {name}")
        _ip(f"-n {switch} link add bridge type bridge")
        _ip(f"-n {switch} link set bridge up")
        for number, name in enumerate(machines.names):
            _ip(f"-n {name} link set lo up")
            _ip(f"-n {name} link add net type veth peer name port{number} netns {switch}")
            _ip(f"-n {name} address add {machines.address(number)}/24 dev net")
            _ip(f"-n {name} link set net up")
            _ip(f"-n {switch} link set port{number} up")
            machines.plug(number)
        yield machines
    finally:
        for name in (*machines.names, switch):
            with suppress(RuntimeError):
                _ip(f"netns del {name}")


def _ip(arguments: str) -> None:
    done = subprocess.run(["ip", *arguments.split()], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {arguments}: {done.stderr.strip()}")
