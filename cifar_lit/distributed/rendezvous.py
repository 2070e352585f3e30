"""Where ranks meet: a port, a network interface, and torch's store, by which the others find the first rank's watch.

torch's own rendezvous leaves three things open. Its client waits without end for what answers at the port but is no store, and
cannot be interrupted while it does. gloo takes the interface of the machine's own name, which on most is 127.0.0.1. And torchrun
lets all attempts meet at the agent's store, where the addresses of an earlier attempt are still found: who reads them too
early cannot connect (github.com/pytorch/pytorch/issues/135712, and seen with torch 2.15).
"""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
import threading
import time
import uuid
from collections.abc import MutableMapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from cifar_lit.distributed.rank_info import RankInfo, by_torchrun
from cifar_lit.errors import Failure, UsageError, first_line

if TYPE_CHECKING:
    from torch.distributed import Store

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
SIOCGIFADDR = 0x8915  # of Linux' netdevice(7): asks for an interface's address
RESTART_TIMEOUT = 300.0  # seconds; processes come late where starting takes long
POLL_SECONDS = 0.02


# ---- ports and interfaces


def is_port_taken(port: int) -> bool:
    """Whether a process of this machine listens on a port."""
    try:
        with socket.create_server(("", port)):
            return False
    except OSError as error:
        return error.errno in (errno.EADDRINUSE, errno.EACCES)


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port


def avoid_taken_port() -> None:
    """Lets Lightning choose a free port where MASTER_PORT is taken: on one machine nobody else needs to know it."""
    port = os.environ.get("MASTER_PORT", "")
    if not port.isdecimal() or is_port_taken(int(port)):
        os.environ.pop("MASTER_PORT", None)


def choose_interface(address: str) -> None:
    """Lets gloo use the network interface that leads to `address`, unless the user has named one."""
    if GLOO_INTERFACE not in os.environ and (interface := interface_to(address)):
        os.environ[GLOO_INTERFACE] = interface


def interface_to(address: str) -> str | None:
    """The name of the interface that this machine reaches an IPv4 address through (`eth0`), None where that cannot be told."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.connect((address, 9))  # nothing is sent, but a way is chosen
            own = udp.getsockname()[0]
            return next((name for _, name in socket.if_nameindex() if _address_of(name, udp) == own), None)
    except (OSError, AttributeError):  # AttributeError: not on Windows
        return None


def _address_of(interface: str, any_socket: socket.socket) -> str | None:
    with suppress(ImportError, OSError):
        from fcntl import ioctl

        answer = ioctl(any_socket.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None


# ---- the first rank's watch, found through the store


def publish_coordinator(info: RankInfo, limit: float, port: int, token: str) -> Any:
    """Says in the store where the first rank's watch listens; returns the store, which must live as long as the process.

    Raises:
        UsageError: when another process listens on the port that all ranks are to meet at.
    """
    store = connect_store(info, limit)
    store.set(_coordinator_key(), json.dumps([port, token]))
    return store


def find_coordinator(info: RankInfo, limit: float, timeout: float) -> tuple[str, str]:
    """Port and token of the first rank's watch, as soon as it has said them.

    Raises:
        Failure: when it has not after `timeout` seconds, or something else answers at its address.
    """
    deadline = time.monotonic() + timeout
    where = f"rank 0 of {info.world} at {info.address}, port {info.port}"
    while True:  # not torch's own wait, which cannot be interrupted
        try:
            socket.create_connection((str(info.address), int(info.port or 0)), timeout=2).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise Failure(
                    f"cannot reach {where}, for {timeout:.0f} s: {error.strerror or error}. Start it within that time; "
                    "is MASTER_ADDR its address, and does no firewall lie between?"
                ) from None
            time.sleep(0.2)
    store = connect_store(info, limit)
    try:
        while not store.check([_coordinator_key()]):
            if time.monotonic() > deadline:
                raise Failure(f"{where} has not begun within {timeout:.0f} s: see what it printed")
            time.sleep(0.1)
        port, token = json.loads(store.get(_coordinator_key()))
    except (RuntimeError, ValueError) as error:
        if isinstance(error, Failure):
            raise
        raise Failure(f"what answers as {where} is not of this run ({first_line(error)}): choose another MASTER_PORT") from None
    return str(port), str(token)


def connect_store(info: RankInfo, limit: float) -> Any:
    """torch's TCPStore at the first rank's address, which the process group will use too; served by torchrun's agent, or rank 0.

    Made in a thread of its own, as it waits without end for the answer of something that is no store.
    """
    from torch.distributed import TCPStore

    serve = info.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address, port, timeout = str(info.address), int(info.port or 0), timedelta(seconds=limit)
    if serve and is_port_taken(port):
        raise UsageError(
            f"port {port}, which MASTER_PORT names, is taken on this machine by another process: choose another, the same for all"
        )
    made: list[Any] = []

    def make() -> None:
        try:
            made.append(TCPStore(address, port, is_master=serve, timeout=timeout, wait_for_workers=False, multi_tenant=serve))
        except RuntimeError as error:
            made.append(error)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(2 * limit)
    if not made or isinstance(made[0], RuntimeError):
        reason = first_line(made[0]) if made else "what is there does not answer"
        raise Failure(
            f"no store of this run is at {address}, port {port}: {reason}. Choose another MASTER_PORT, the same for all."
        )
    return made[0]


def _coordinator_key() -> str:
    """Of the store's entry; the agent of torchrun may keep one store over its restarts."""
    return f"cifar_lit/watch/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


# ---- a fresh port for processes that torchrun starts again


def meet_anew(environment: MutableMapping[str, str]) -> None:
    """Moves the meeting point of a torchrun that may have started processes before; else nothing changes.

    Raises:
        Failure: when not all processes come in time.
    """
    if not by_torchrun(environment) or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    world, here = int(environment["WORLD_SIZE"]), int(environment["LOCAL_WORLD_SIZE"])
    restarts = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if world == 1 or (world == here and restarts == 0):
        return
    from torch.distributed import TCPStore

    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=RESTART_TIMEOUT))
    port, restarts = agree_on_port(store, int(environment["RANK"]), world, restarts, RESTART_TIMEOUT)
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
    token = uuid.uuid4().hex
    deadline = time.monotonic() + limit

    def read(key: str) -> Any:
        return json.loads(store.get(f"cifar_lit/{key}")) if store.check([f"cifar_lit/{key}"]) else None

    def say(key: str, value: Any) -> None:
        store.set(f"cifar_lit/{key}", json.dumps(value))

    def wait() -> None:
        if time.monotonic() > deadline:
            raise Failure(f"process {os.getpid()} has waited {limit:.0f} s for the others of this run: see what they printed")
        time.sleep(POLL_SECONDS)

    if rank > 0:
        say(f"hello/{rank}", [token, restarts])
        while token not in ((answer := read("answer")) or {"heard": []})["heard"]:
            wait()
        say(f"confirmed/{rank}", answer["token"])
        while (agreed := read("agreed") or {}).get("token") != answer["token"]:
            wait()
        return agreed["port"], agreed["restarts"]
    others, answered = range(1, world), None
    while any(read(f"confirmed/{other}") != token for other in others):
        hellos = [read(f"hello/{other}") or ["", 0] for other in others]
        if hellos != answered:
            say("answer", {"token": token, "heard": [hello for hello, _ in hellos]})
            answered = hellos
        wait()
    counts = [restarts, *(read(f"hello/{other}")[1] for other in others), int(read("agreed") is not None)]
    port = free_port()
    say("agreed", {"token": token, "port": port, "restarts": max(counts)})
    return port, max(counts)
