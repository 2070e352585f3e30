"""Where ranks meet: a network interface, and a port of their own for processes that torchrun starts.

torch's own rendezvous leaves two things open. gloo takes the interface of the machine's own name, which on most is 127.0.0.1.
And torchrun lets all attempts meet at the agent's store, where the addresses of an earlier attempt are still found: who reads
them too early cannot connect (github.com/pytorch/pytorch/issues/135712, and seen with torch 2.15).
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
import uuid
from collections.abc import MutableMapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from cifar_lit.distributed.rank_info import by_torchrun
from cifar_lit.errors import Failure

if TYPE_CHECKING:
    from torch.distributed import Store

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
SIOCGIFADDR = 0x8915  # of Linux' netdevice(7): asks for an interface's address
MEET_SECONDS = 300.0  # processes come late where starting takes long
POLL_SECONDS = 0.02


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.create_server(("", 0)) as listener:
        return int(listener.getsockname()[1])


def choose_interface(address: str) -> None:
    """Lets gloo use the network interface that leads to an IPv4 address, unless the user has named one or it cannot be told."""
    with suppress(OSError, ImportError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        from fcntl import ioctl  # not on Windows

        udp.connect((address, 9))  # nothing is sent, but a way is chosen
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no such address
                answer = ioctl(udp.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == udp.getsockname()[0]:
                    os.environ.setdefault(GLOO_INTERFACE, name)


def meet_anew(environment: MutableMapping[str, str]) -> None:
    """Gives this attempt of torchrun a meeting point of its own; started by others, nothing changes.

    Raises:
        Failure: when not all processes come in time.
    """
    if not by_torchrun(environment) or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    world, restarts = int(environment["WORLD_SIZE"]), int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if world == 1:
        return
    from torch.distributed import TCPStore

    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=MEET_SECONDS))
    port, restarts = agree_on_port(store, int(environment["RANK"]), world, restarts, MEET_SECONDS)
    environment["MASTER_PORT"], environment["TORCHELASTIC_USE_AGENT_STORE"] = str(port), "False"
    environment["TORCHELASTIC_RESTART_COUNT"] = str(restarts)


def agree_on_port(store: Store, rank: int, world: int, restarts: int, limit: float) -> tuple[int, int]:
    """A port, free on the machine of rank 0, at which `world` processes of one attempt meet, and how often they were restarted.

    torchrun's count does not tell attempts apart on several nodes, as each node counts its own: the highest holds, and it is
    at least one where an earlier attempt has come this far. Called by each process. Each further one says hello with a token of
    its own until the first one answers that it has heard it, and confirms; when all have, the first one says what holds.
    Nothing that an earlier attempt has left answers a new token.

    Raises:
        Failure: after `limit` seconds.
    """
    token, deadline = uuid.uuid4().hex, time.monotonic() + limit

    def read(key: str, default: Any) -> Any:
        return json.loads(store.get(f"cifar_lit/{key}")) if store.check([f"cifar_lit/{key}"]) else default

    def say(key: str, value: Any) -> None:
        store.set(f"cifar_lit/{key}", json.dumps(value))

    def wait() -> None:
        if time.monotonic() > deadline:
            raise Failure(f"process {os.getpid()} has waited {limit:.0f} s for the others of this run: see what they printed")
        time.sleep(POLL_SECONDS)

    if rank > 0:
        say(f"hello/{rank}", [token, restarts])
        while token not in (answer := read("answer", {"heard": []}))["heard"]:
            wait()
        say(f"confirmed/{rank}", answer["token"])
        while (agreed := read("agreed", {"token": ""}))["token"] != answer["token"]:
            wait()
        return agreed["port"], agreed["restarts"]
    others, hellos = range(1, world), None
    while any(read(f"confirmed/{other}", "") != token for other in others):
        if hellos != (hellos := [read(f"hello/{other}", ["", 0]) for other in others]):
            say("answer", {"token": token, "heard": [hello for hello, _ in hellos]})
        wait()
    counts = [restarts, *(read(f"hello/{other}", None)[1] for other in others), int(read("agreed", None) is not None)]
    port = free_port()
    say("agreed", {"token": token, "port": port, "restarts": max(counts)})
    return port, max(counts)
