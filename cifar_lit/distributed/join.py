"""How the ranks of a run come together before they share any work, and part again."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from typing import Any

from cifar_lit.distributed.rank_info import COORDINATOR, RankInfo
from cifar_lit.distributed.rank_watch import FAILED, JOIN_FACTOR, STOPPED, Coordinator, Fault, RankWatch, Worker
from cifar_lit.distributed.rendezvous import choose_interface
from cifar_lit.errors import Failure

LOSS_SECONDS = 5.0  # that a rank's loss may take to be known here, after it was felt
TORCHRUN_LOSS_SECONDS = 0.5  # the same, after torchrun has felt it

_watch: RankWatch | None = None
_stores: list[Any] = []  # torch's, of the process group to come, which must live as long as this process


def join(info: RankInfo, limit: float) -> RankWatch | None:
    """Starts this process's watch, None when it is alone; waits for the first rank where that must be found.

    Args:
        info: this process's rank.
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
    if lost and watch.fault_known.wait(LOSS_SECONDS) and watch.fault is not None:
        watch.main_thread_ends.set()
        line = watch.line_about(watch.fault)
        watch.end_children()
        return line
    watch.main_thread_ends.set()
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
    address, port, token = json.loads(os.environ[COORDINATOR]) if COORDINATOR in os.environ else (info.address, info.port, "")
    timeout = JOIN_FACTOR * limit
    deadline = time.monotonic() + timeout
    while True:
        try:
            connected = socket.create_connection((address, port), timeout=2)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                reason = f"for {timeout:.0f} s: {error.strerror or error}. Start it within that time"
                hint = "is MASTER_ADDR its address, and does no firewall lie between?"
                raise Failure(f"cannot reach rank 0 of {info.world} at {address}, port {port}, {reason}; {hint}") from None
            time.sleep(0.2)
    watch = Worker(info, limit, connected, token)
    if not watch.is_welcome():
        hint = "what is there does not answer. Choose another MASTER_PORT, the same for all."
        raise Failure(f"no rank 0 of this run is at {address}, port {port}: {hint}")
    os.environ[COORDINATOR] = json.dumps([address, port, token])  # for ranks that this one's Trainer starts
    return watch
