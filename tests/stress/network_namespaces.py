"""Two machines on one: network namespaces of Linux, each with its own address, joined by a switch that can be unplugged."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from types import TracebackType
from typing import Self

NETWORK = "10.77.31"
# Process numbers and a name of its own too; the shell is its first process, which no signal from within can end.
_OWN_PROCESSES = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"]


def why_not() -> str | None:
    """What this system lacks for namespaces, None when they can be made."""
    if shutil.which("ip") is None:
        return "the command ip (iproute2) is not installed"
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces take root"
    name = f"cifar-lit-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return None


class TwoMachines:
    """Namespaces that exist within a `with`; machines are numbered 0 and 1."""

    def __init__(self) -> None:
        self._names = [f"cifar-lit-{os.getpid()}-{what}" for what in ("0", "1", "switch")]

    def __enter__(self) -> Self:
        switch = self._names[2]
        try:
            for name in self._names:
                _ip("netns", "add", name)
            _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", switch, "link", "set", "bridge", "up")
            for number, name in enumerate(self._names[:2]):
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "link", "add", "net", "type", "veth", "peer", "name", f"port{number}", "netns", switch)
                _ip("-n", name, "address", "add", f"{self.address(number)}/24", "dev", "net")
                _ip("-n", name, "link", "set", "net", "up")
                _ip("-n", switch, "link", "set", f"port{number}", "up")
                self.plug(number)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    def _remove(self) -> None:
        for name in self._names:
            with suppress(RuntimeError):
                _ip("netns", "del", name)

    def address(self, number: int) -> str:
        """A machine's address."""
        return f"{NETWORK}.{number + 1}"

    def within(self, number: int) -> list[str]:
        """The words before a command that is to run on a machine."""
        own = [*_OWN_PROCESSES, f'hostname machine-{number}; "$@"; exit $?', "sh"]
        return ["ip", "netns", "exec", self._names[number], *own]

    def plug(self, number: int) -> None:
        """Joins a machine to the network."""
        _ip("-n", self._names[2], "link", "set", f"port{number}", "master", "bridge")

    def unplug(self, number: int) -> None:
        """Cuts a machine off: from then on nothing that is sent arrives, and nobody is told."""
        _ip("-n", self._names[2], "link", "set", f"port{number}", "nomaster")


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
