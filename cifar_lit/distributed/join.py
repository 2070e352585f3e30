"""How the ranks of a run come together before they share any work, and part again.

torch's own rendezvous leaves two things open. gloo takes the interface of the machine's own name, which on most is 127.0.0.1.
And torchrun lets all attempts meet at the agent's store, where the addresses of an earlier attempt are still found: who reads
them too early cannot connect (github.com/pytorch/pytorch/issues/135712, and seen with torch 2.15).
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import time
import uuid
from collections.abc import MutableMapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from cifar_lit.distributed.rank_info import COORDINATOR, RankInfo, by_torchrun
from cifar_lit.distributed.rank_watch import FAILED, JOIN_FACTOR, STOPPED, Coordinator, Fault, RankWatch, Worker
from cifar_lit.errors import Failure

if TYPE_CHECKING:
    from torch.distributed import Store

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
SIOCGIFADDR = 0x8915  # of Linux' netdevice(7): asks for an interface's address
MEET_SECONDS = 300.0  # processes come late where starting takes long
POLL_SECONDS = 0.02
LOSS_SECONDS = 5.0  # that a rank's loss may take to be known here, after it was felt
TORCHRUN_LOSS_SECONDS = 0.5  # the same, after torchrun has felt it

_watch: RankWatch | None = None
_stores: list[Any] = []  # torch's, of the process group to come, which must live as long as this process


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
    world = int(environment.get("WORLD_SIZE", "1"))
    if not by_torchrun(environment) or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or world == 1:
        return
    from torch.distributed import TCPStore

    address, port, restarts = (
        environment[name] for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    )
    store = TCPStore(address, int(port), is_master=False, timeout=timedelta(seconds=MEET_SECONDS))
    agreed = agree_on_port(store, int(environment["RANK"]), world, int(restarts), MEET_SECONDS)
    environment["MASTER_PORT"], environment["TORCHELASTIC_RESTART_COUNT"] = map(str, agreed)
    environment["TORCHELASTIC_USE_AGENT_STORE"] = "False"


def agree_on_port(store: Store, rank: int, world: int, restarts: int, limit: float) -> tuple[int, int]:
    """A port, free on the machine of rank 0, at which `world` processes of one attempt meet, and how often they were restarted.

    torchrun's count does not tell attempts apart on several nodes, as each node counts its own: the highest holds, and it is
    at least one where an earlier attempt has come this far. Each further process says hello with a token of its own until the
    first one answers that it has heard it, and confirms; when all have, the first one says what holds. Nothing that an earlier
    attempt has left answers a new token.

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
            raise Failure(
                f"process {os.getpid()} has waited {limit:.0f} s for the others of this run: see what they printed"
            )
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


def join(info: RankInfo, limit: float) -> RankWatch | None:
    """Starts this process's watch, None when it is alone; waits for the first rank where that must be found.

    Args:
        limit: seconds of silence after which a rank counts as lost, and `JOIN_FACTOR` times that for all to come together.

    Raises:
        UsageError: when the port that all are to meet at is taken.
        Failure: when the first rank cannot be found.
    """
    global _watch
    if info.world == 1:
        return None
    from lightning.pytorch.strategies.launchers import subprocess_script

    if info.address is not None:
        choose_interface(info.address)
    _watch = _coordinator(info, limit) if info.rank == 0 else _worker(info, limit)
    os.environ["MASTER_PORT"] = str(_watch.store_port)  # where Lightning's process group meets
    if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
        os.register_at_fork(after_in_child=_forget)
    # Lightning's own observer kills this process, without a word, up to 5 s after a rank that it has started ended in failure
    subprocess_script._launch_process_observer = _watch.adopt  # type: ignore[assignment]
    _watch.start()
    return _watch


def leave(line: str, code: int, lost: bool = False) -> str:
    """Tells the other ranks how this one ends; returns what it is to print of `line`.

    lost: the error is what the loss of another rank leads to, so that the line is about that rank.
    """
    global _watch
    watch, _watch = _watch, None
    if watch is None:
        return line
    if code >= 128 and watch.info.parent is not None:  # torchrun stops all others when it has lost one
        known = watch.fault_known.wait(TORCHRUN_LOSS_SECONDS)
        lost = known and watch.fault is not None and watch.fault.kind != STOPPED
    lost_rank = lost and watch.fault_known.wait(LOSS_SECONDS)
    watch.main_thread_ends.set()
    if lost_rank and watch.fault is not None:
        line = watch.line_about(watch.fault)
        watch.end_children()
        return line
    if code == 0:
        watch.finish()
        return line
    if watch.info.rank and line and not line.startswith("[rank"):  # of another machine, where it is the first process
        line = f"[rank {watch.info.rank}] {line}"
    what = "lost its connection to another rank" if lost else f"failed: {line.rpartition('cifar-lit: ')[2]}"
    fault = watch.fail(Fault(watch.info.rank, STOPPED if code >= 128 else FAILED, what, code))
    # what all ranks fail with is printed once
    return line if fault.rank == watch.info.rank or fault.what != what else ""


def _forget() -> None:
    """In a fork of this process, such as a worker that loads images: it is no rank."""
    global _watch
    watch, _watch = _watch, None
    if watch is not None:
        watch.close_in_fork()


def _coordinator(info: RankInfo, limit: float) -> Coordinator:
    from torch.distributed import TCPStore

    # only the ranks that this one starts can be told a secret
    watch = Coordinator(info, limit, secrets.token_hex(16) if info.address is None else "")
    address = info.address or "127.0.0.1"
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    watch.store_port = store.port
    _stores.append(store)
    os.environ[COORDINATOR] = json.dumps([address, watch.port, watch.token])
    return watch


def _worker(info: RankInfo, limit: float) -> Worker:
    address, port, token = (
        json.loads(os.environ[COORDINATOR]) if COORDINATOR in os.environ else (info.address, info.port, "")
    )
    timeout, watch = JOIN_FACTOR * limit, None
    deadline = time.monotonic() + timeout
    while watch is None:
        try:
            watch = Worker(info, limit, socket.create_connection((address, port), timeout=2), token)
        except OSError as error:
            if time.monotonic() > deadline:
                reason = f"for {timeout:.0f} s: {error.strerror or error}. Start it within that time"
                hint = "is MASTER_ADDR its address, and does no firewall lie between?"
                raise Failure(
                    f"cannot reach rank 0 of {info.world} at {address}, port {port}, {reason}; {hint}"
                ) from None
            time.sleep(0.2)
    if not watch.is_welcome():
        hint = "what is there does not answer. Choose another MASTER_PORT, the same for all."
        raise Failure(f"no rank 0 of this run is at {address}, port {port}: {hint}")
    os.environ[COORDINATOR] = json.dumps([address, port, token])  # for ranks that this one's Trainer starts
    return watch
