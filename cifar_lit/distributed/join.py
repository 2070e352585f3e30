"""Connect the ranks of a run before they share any work, and report how each rank ends.

torch's own rendezvous has two gaps. gloo uses the interface of the machine's host name, which is often 127.0.0.1. And
under torchrun all attempts use the agent's store, which still holds the addresses of an earlier attempt. A rank that
reads these old addresses cannot connect (github.com/pytorch/pytorch/issues/135712, still present in torch 2.15).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import MutableMapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from cifar_lit.distributed.rank_info import COORDINATOR, RankInfo, by_torchrun
from cifar_lit.distributed.rank_watch import FAILED, JOIN_FACTOR, STOPPED, Fault, RankWatch, keys_of
from cifar_lit.errors import Failure, UsageError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
MEET_SECONDS = 300.0  # some machines start late
LOSS_SECONDS = 6.0  # time for the watch to identify a lost rank after an error caused by the loss
UNBOUNDED = timedelta(days=7)  # a scheduler may suspend all ranks during a call of the store

_watch: RankWatch | None = None
_stores: dict[int, TCPStore] = {}  # by port; the first rank serves them until its process ends


def choose_interface(address: str) -> None:
    """Make gloo use the network interface that routes to an IPv4 address, unless the user has chosen one."""
    with suppress(OSError, ImportError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        import psutil

        udp.connect((address, 9))  # selects a route without sending anything
        for name, addresses in psutil.net_if_addrs().items():
            if udp.getsockname()[0] in (each.address for each in addresses):
                os.environ.setdefault(GLOO_INTERFACE, name)


def meet_anew(environment: MutableMapping[str, str]) -> None:
    """Give this attempt of torchrun its own store; do nothing under other launchers.

    torchrun's restart count does not identify an attempt on several nodes, as each node counts its own restarts. Rank 0
    publishes its count and the port of its store in the agent's store. The store of an earlier attempt is gone, or has
    seen a process of the same rank. Raise Failure if rank 0 does not arrive in time.
    """
    world = int(environment.get("WORLD_SIZE", "1"))
    if not by_torchrun(environment) or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or world == 1:
        return
    from torch.distributed import TCPStore

    address, rank, store = environment["MASTER_ADDR"], int(environment["RANK"]), None
    agent = TCPStore(address, int(environment["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=MEET_SECONDS))
    restarts = int(environment["TORCHELASTIC_RESTART_COUNT"])
    deadline = time.monotonic() + MEET_SECONDS
    if rank == 0:
        restarts = max(restarts, agent.add("cifar_lit/attempts", 1) - 1)
        store = serve(RankInfo(0, world, address))
        agent.set("cifar_lit/meeting", f"{store.port} {restarts}")
    while store is None or (rank > 0 and store.add(f"cifar_lit/joined/{rank}", 1) > 1):
        if time.monotonic() > deadline:
            raise Failure(f"rank {rank} waited {MEET_SECONDS:.0f} s for rank 0: see what it printed")
        time.sleep(0.02)
        with suppress(RuntimeError):
            port, restarts = map(int, agent.get("cifar_lit/meeting").split())
            store = connect(address, port, 1.0)
    environment["MASTER_PORT"], environment["TORCHELASTIC_RESTART_COUNT"] = str(store.port), str(restarts)
    environment["TORCHELASTIC_USE_AGENT_STORE"] = "False"


def serve(info: RankInfo) -> TCPStore:
    """Return the store of a run, which this process serves. Raise UsageError if another process uses MASTER_PORT."""
    from torch.distributed import TCPStore

    address, port = info.address or "127.0.0.1", info.port or 0
    try:
        socket.create_server(("", port)).close()
    except OSError:
        raise UsageError(
            f"MASTER_PORT {port} is in use by another process on this machine: "
            "choose another port, the same for all machines"
        ) from None
    store = TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=UNBOUNDED, multi_tenant=True)
    for key in keys_of(info.world):
        store.set(key, "")
    _stores[store.port] = store
    return store


def connect(address: str, port: int, seconds: float) -> TCPStore:
    """Return the store that the first rank serves; raise RuntimeError if there is none within these seconds."""
    from torch.distributed import TCPStore

    store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))
    store.set_timeout(UNBOUNDED)
    _stores[port] = store
    return store


def store_of(info: RankInfo, limit: float) -> TCPStore:
    """Return the store of a run. Raise UsageError if MASTER_PORT is in use, Failure if rank 0 is unreachable."""
    port = info.port or int(os.environ.get(COORDINATOR, "0"))
    if port in _stores:  # `meet_anew` has opened it
        return _stores[port]
    if info.rank == 0:
        return serve(info)
    address, timeout = info.address or "127.0.0.1", JOIN_FACTOR * limit
    try:
        return connect(address, port, timeout)
    except RuntimeError:  # torch's DistError
        raise Failure(
            f"cannot reach rank 0 of {info.world} at {address}, port {port}, within {timeout:.0f} s. Start it within "
            "that time. Check that MASTER_ADDR is its address, and that no firewall blocks the port."
        ) from None


def start_watch(info: RankInfo, limit: float) -> RankWatch:
    """Return the running watch of this process, connected to the store of the run. Raises the errors of `store_of`."""
    global _watch
    _watch = RankWatch(info, limit, store_of(info, limit))
    _watch.start()
    return _watch


def join(info: RankInfo, limit: float) -> RankWatch | None:
    """Start and return this process's watch; None for a single process.

    Args:
        info: rank of this process.
        limit: seconds without a heartbeat after which a rank counts as lost. All ranks must connect within
            `JOIN_FACTOR` times this limit.

    Raises:
        UsageError: MASTER_PORT is in use.
        Failure: the first rank is unreachable.
    """
    if info.world == 1:
        return None
    from lightning.pytorch.strategies.launchers import subprocess_script

    if info.address is not None:
        choose_interface(info.address)
    watch = start_watch(info, limit)
    # For Lightning's process group, and for the ranks that this process's Trainer starts.
    os.environ["MASTER_PORT"] = os.environ[COORDINATOR] = str(watch.store.port)
    # Lightning's observer kills this process without a message, up to 5 s after one of its child ranks has failed.
    subprocess_script._launch_process_observer = watch.adopt  # type: ignore[assignment]
    return watch


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
    if lost:
        watch.limit = min(watch.limit, 3 * watch.heartbeat_seconds)
        watch.fault_known.wait(LOSS_SECONDS)
    watch.main_thread_ends.set()
    if lost and watch.fault is not None:
        line = watch.line_about(watch.fault)
        watch.end_children()
        return line
    if code == 0:
        watch.finish()
        return line
    if watch.info.rank and line and not line.startswith("[rank"):
        line = f"[rank {watch.info.rank}] {line}"
    what = "lost its connection to another rank" if lost else f"failed: {line.rpartition('cifar-lit: ')[2]}"
    fault = watch.fail(Fault(watch.info.rank, STOPPED if code >= 128 else FAILED, what, code))
    # An error that all ranks share is printed once.
    return line if fault.rank == watch.info.rank or fault.what != what else ""
