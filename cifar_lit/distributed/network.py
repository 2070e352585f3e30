"""The network as the ranks of several machines use it."""

from __future__ import annotations

import errno
import os
import socket
import struct
from contextlib import suppress

GLOO = "GLOO_SOCKET_IFNAME"
_ADDRESS_OF = 0x8915  # SIOCGIFADDR of Linux' netdevice(7)


def busy(port: int) -> bool:
    """Whether a process of this machine listens on a port."""
    try:
        with socket.create_server(("", port)):
            return False
    except OSError as error:
        return error.errno in (errno.EADDRINUSE, errno.EACCES)


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("", 0))
        port: int = found.getsockname()[1]
        return port


def choose_interface(address: str) -> None:
    """Lets gloo use the network interface that leads to `address`, unless the user has named one.

    It would take the one that the machine's own name stands for, which on most is 127.0.0.1: other machines' ranks look
    for this one on theirs then.
    """
    if GLOO not in os.environ and (found := interface_to(address)):
        os.environ[GLOO] = found


def interface_to(address: str) -> str | None:
    """The name of the interface that this machine reaches an IPv4 address through (`eth0`), None where that cannot be told."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
            trial.connect((address, 9))  # of UDP: nothing is sent, but a way is chosen
            own = trial.getsockname()[0]
            return next((name for _, name in socket.if_nameindex() if _address_of(name, trial) == own), None)
    except (OSError, AttributeError):  # AttributeError: not on Windows
        return None


def _address_of(interface: str, any_socket: socket.socket) -> str | None:
    with suppress(ImportError, OSError):
        from fcntl import ioctl

        found = ioctl(any_socket.fileno(), _ADDRESS_OF, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(found[20:24])
    return None
