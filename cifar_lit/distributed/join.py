"""Connect the ranks of a run before they share any work, and report how each rank ends.

torch's own rendezvous has two gaps. gloo uses the interface of the machine's host name, which is often 127.0.0.1. And
under torchrun all attempts use the agent's store, which still holds the addresses of an earlier attempt. A rank that
reads these old addresses cannot connect (github.com/pytorch/pytorch/issues/135712, still present in torch 2.15).
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
import uuid
from collections.abc import MutableMapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil

from cifar_lit.distributed.rank_info import COORDINATOR, RankInfo, by_torchrun
from cifar_lit.distributed.rank_watch import FAILED, JOIN_FACTOR, STOPPED, Coordinator, Fault, RankWatch, Worker
from cifar_lit.errors import Failure

if TYPE_CHECKING:
    from torch.distributed import Store

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
MEET_SECONDS = 300.0  # some machines start late
POLL_SECONDS = 0.02
LOSS_SECONDS = 5.0  # time for the watch to identify a lost rank after an error caused by the loss
TORCHRUN_LOSS_SECONDS = 0.5  # time for the watch to identify a lost rank if torchrun noticed the loss first

_watch: RankWatch | None = None
_stores: list[object] = []  # keeps torch's store alive until the process ends


def free_port() -> int:
    """Return an unused port of this machine."""
    with socket.create_server(("", 0)) as listener:
        return int(listener.getsockname()[1])


def choose_interface(address: str) -> None:
    """Make gloo use the network interface that routes to an IPv4 address, unless the user has chosen one."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.connect((address, 9))  # selects a route without sending anything
        for name, addresses in psutil.net_if_addrs().items():
            if udp.getsockname()[0] in (each.address for each in addresses):
                os.environ.setdefault(GLOO_INTERFACE, name)


def meet_anew(environment: MutableMapping[str, str]) -> None:
    """Give this attempt of torchrun its own rendezvous port; do nothing under other launchers.

    Raise Failure if some processes do not arrive in time.
    """
    world = int(environment.get("WORLD_SIZE", "1"))
    if not by_torchrun(environment) or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or world == 1:
        return
    from torch.distributed import TCPStore

    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=MEET_SECONDS))
    rank, restarts = int(environment["RANK"]), int(environment["TORCHELASTIC_RESTART_COUNT"])
    agreed = agree_on_port(store, rank, world, restarts, MEET_SECONDS)
    environment["MASTER_PORT"], environment["TORCHELASTIC_RESTART_COUNT"] = map(str, agreed)
    environment["TORCHELASTIC_USE_AGENT_STORE"] = "False"


def agree_on_port(store: Store, rank: int, world: int, restarts: int, limit: float) -> tuple[int, int]:
    """Return a port, unused on the machine of rank 0, and the number of restarts of this attempt, equal on all ranks.

    torchrun's count does not identify an attempt on several nodes, as each node counts its own restarts. The highest
    count is used, and at least one if an earlier attempt got this far. Every other rank publishes a random token, waits
    until rank 0 acknowledges the token, and confirms. After all confirmations, rank 0 publishes the result. Keys of an
    earlier attempt never contain a new token. Raise Failure after `limit` seconds.
    """
    token = uuid.uuid4().hex
    deadline = time.monotonic() + limit

    def read(key: str, default: Any) -> Any:
        if not store.check([f"cifar_lit/{key}"]):
            return default
        return json.loads(store.get(f"cifar_lit/{key}"))

    def write(key: str, value: object) -> None:
        store.set(f"cifar_lit/{key}", json.dumps(value))

    def wait() -> None:
        if time.monotonic() > deadline:
            raise Failure(f"process {os.getpid()} waited {limit:.0f} s for the other ranks: see what they printed")
        time.sleep(POLL_SECONDS)

    if rank > 0:
        write(f"hello/{rank}", [token, restarts])
        answer = read("answer", {"acknowledged": []})
        while token not in answer["acknowledged"]:
            wait()
            answer = read("answer", {"acknowledged": []})
        write(f"confirmed/{rank}", answer["token"])
        agreed = read("agreed", {"token": ""})
        while agreed["token"] != answer["token"]:
            wait()
            agreed = read("agreed", {"token": ""})
        return agreed["port"], agreed["restarts"]
    others = range(1, world)
    answered = None
    while any(read(f"confirmed/{other}", "") != token for other in others):
        hellos = [read(f"hello/{other}", ["", 0]) for other in others]
        if hellos != answered:
            write("answer", {"token": token, "acknowledged": [hello for hello, _ in hellos]})
            answered = hellos
        wait()
    counts = [restarts, *(read(f"hello/{other}", None)[1] for other in others)]
    if read("agreed", None) is not None:  # from before a restart
        counts.append(1)
    port = free_port()
    write("agreed", {"token": token, "port": port, "restarts": max(counts)})
    return port, max(counts)


def join(info: RankInfo, limit: float) -> RankWatch | None:
    """Start and return this process's watch, connected to the first rank; None for a single process.

    Args:
        limit: seconds without a heartbeat after which a rank counts as lost. All ranks must connect within
            `JOIN_FACTOR` times this limit.

    Raises:
        UsageError: MASTER_PORT is in use.
        Failure: the first rank is unreachable.
    """
    global _watch
    if info.world == 1:
        return None
    from lightning.pytorch.strategies.launchers import subprocess_script

    if info.address is not None:
        choose_interface(info.address)
    _watch = _coordinator(info, limit) if info.rank == 0 else _worker(info, limit)
    os.environ["MASTER_PORT"] = str(_watch.store_port)  # for Lightning's process group
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=_forget)
    # Lightning's observer kills this process without a message, up to 5 s after one of its child ranks has failed.
    subprocess_script._launch_process_observer = _watch.adopt  # type: ignore[assignment]
    _watch.start()
    return _watch


def leave(line: str, code: int, lost: bool = False) -> str:
    """Tell the other ranks how this one ends, and return the line that it must print.

    Args:
        line: message about this rank's own error, empty for none.
        code: exit code; 128 or more after a signal.
        lost: whether the loss of another rank caused the error. If so, the returned line is about the lost rank.
    """
    global _watch
    watch, _watch = _watch, None
    if watch is None:
        return line
    if code >= 128 and watch.info.parent is not None:  # torchrun stops all ranks after losing one
        is_known = watch.fault_known.wait(TORCHRUN_LOSS_SECONDS)
        lost = is_known and watch.fault is not None and watch.fault.kind != STOPPED
    lost_rank = lost and watch.fault_known.wait(LOSS_SECONDS)
    watch.main_thread_ends.set()
    if lost_rank and watch.fault is not None:
        line = watch.line_about(watch.fault)
        watch.end_children()
        return line
    if code == 0:
        watch.finish()
        return line
    if watch.info.rank and line and not line.startswith("[rank"):
        line = f"[rank {watch.info.rank}] {line}"
    what = f"failed: {line.rpartition('cifar-lit: ')[2]}"
    if lost:
        what = "lost its connection to another rank"
    kind = STOPPED if code >= 128 else FAILED
    fault = watch.fail(Fault(watch.info.rank, kind, what, code))
    if fault.rank != watch.info.rank and fault.what == what:  # an error that all ranks share is printed once
        return ""
    return line


def _forget() -> None:
    """Drop the watch in a forked child, such as a data-loading worker."""
    global _watch
    watch, _watch = _watch, None
    if watch is not None:
        watch.close_in_fork()


def _coordinator(info: RankInfo, limit: float) -> Coordinator:
    from torch.distributed import TCPStore

    token = ""
    if info.address is None:  # a secret can only be passed to child processes
        token = secrets.token_hex(16)
    watch = Coordinator(info, limit, token)
    address = info.address or "127.0.0.1"
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    watch.store_port = store.port
    _stores.append(store)
    os.environ[COORDINATOR] = json.dumps([address, watch.port, watch.token])
    return watch


def _worker(info: RankInfo, limit: float) -> Worker:
    if COORDINATOR in os.environ:
        address, port, token = json.loads(os.environ[COORDINATOR])
    else:
        address, port, token = info.address, info.port, ""
    timeout, watch = JOIN_FACTOR * limit, None
    deadline = time.monotonic() + timeout
    while watch is None:
        try:
            watch = Worker(info, limit, socket.create_connection((address, port), timeout=2), token)
        except OSError as error:
            if time.monotonic() > deadline:
                raise Failure(
                    f"cannot reach rank 0 of {info.world} at {address}, port {port}, within {timeout:.0f} s "
                    f"({error.strerror or error}). Start it within that time. Check that MASTER_ADDR is its address, "
                    "and that no firewall blocks the port."
                ) from None
            time.sleep(0.2)
    if not watch.is_welcome():
        raise Failure(
            f"another program answers at {address}, port {port}, instead of rank 0 of this run. "
            "Choose another MASTER_PORT, the same for all machines."
        )
    os.environ[COORDINATOR] = json.dumps([address, port, token])  # for the ranks that this process's Trainer starts
    return watch
