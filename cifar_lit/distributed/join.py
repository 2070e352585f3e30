"""How the ranks of a run come together before they share any work, and part again."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any

from cifar_lit.distributed.coordinator import JOIN, Coordinator
from cifar_lit.distributed.network import busy, choose_interface
from cifar_lit.distributed.rank_info import HUB, RankInfo
from cifar_lit.distributed.watch import DONE, FAILED, STOPPED, Fault, Watch
from cifar_lit.distributed.worker import Worker
from cifar_lit.errors import Failure, UsageError, first_line

LOST = 5.0  # seconds that a rank's loss may take to be known here, after it was felt
STOPPED_FOR = 0.5  # the same, after torchrun has felt it

_watch: Watch | None = None
_kept: list[Any] = []  # the store, which lives as long as the process


def join(place: RankInfo, limit: float) -> Watch | None:
    """Starts this process's watch, None when it is alone; waits for the first rank where that must be found.

    limit: seconds of silence after which a rank counts as lost, and `JOIN` times that for all to come together.
    Raises UsageError when the port that all are to meet at is taken, Failure when the first rank cannot be found.
    """
    global _watch
    if place.world == 1:
        return None
    from lightning.pytorch.strategies.launchers import subprocess_script

    if place.address is not None:
        choose_interface(place.address)
    watch: Watch = _first(place, limit) if place.rank == 0 else _other(place, limit)
    _watch = watch
    if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
        os.register_at_fork(after_in_child=_forget)
    # Lightning's own observer kills this process, without a word, up to 5 s after a rank that it has started ended in failure
    subprocess_script._launch_process_observer = watch.adopt  # type: ignore[assignment]
    watch.start()
    return watch


def leave(line: str, code: int, lost: bool = False) -> str:
    """Tells the other ranks how this one ends; returns what it is to print of `line`.

    lost: the error is what the loss of another rank leads to, so that the line is about that rank.
    """
    global _watch
    watch, _watch = _watch, None
    if watch is None:
        return line
    if code >= 128 and watch.place.parent is not None:  # torchrun stops all others when it has lost one
        lost = watch.found.wait(STOPPED_FOR) and watch.fault is not None and watch.fault.kind != STOPPED
    if lost and watch.found.wait(LOST):
        watch.leave()
        assert watch.fault is not None
        line = watch.say(watch.fault)
        watch.end_children()
        return line
    watch.leave()
    if watch.place.rank and line and not line.startswith("[rank"):  # of another machine, where it is the first process
        line = f"[rank {watch.place.rank}] {line}"
    how = DONE if code == 0 else STOPPED if code >= 128 else FAILED
    what = "lost its connection to another rank" if lost else f"failed: {line.rpartition('cifar-lit: ')[2]}"
    if isinstance(watch, Worker):
        return line if watch.report(how, what, code) else ""
    assert isinstance(watch, Coordinator)
    if how == DONE:
        watch.close()
        return line
    teller = watch.teller(what, 0) if how == FAILED else 0
    if watch.fault is None:
        watch.fault = Fault(teller, how, what, code)
        watch.tell(watch.fault)
    watch.end_children()
    watch.rest()
    return line if teller == 0 else ""


def _forget() -> None:
    """In a fork of this process, such as a worker that loads images: it is no rank."""
    global _watch
    watch, _watch = _watch, None
    if watch is not None:
        watch.forget()


def _first(place: RankInfo, limit: float) -> Coordinator:
    hub = Coordinator(place, limit)
    if place.address is None or place.port is None:
        os.environ[HUB] = f"127.0.0.1:{hub.port}:{hub.token}"
        _avoid_busy_port()
        return hub
    store = _store(place, limit, serve=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True")
    store.set(_key(), json.dumps([hub.port, hub.token]))
    _kept.append(store)
    return hub


def _other(place: RankInfo, limit: float) -> Worker:
    if place.address is None:
        address, port, token = os.environ[HUB].split(":")
    else:
        address = place.address
        port, token = _find_hub(place, limit)
    try:
        connected = socket.create_connection((address, int(port)), timeout=limit)
    except OSError as error:
        raise Failure(f"rank 0 does not answer at {address}, port {port}: {error.strerror or error}") from None
    return Worker(place, limit, connected, token)


def _find_hub(place: RankInfo, limit: float) -> tuple[str, str]:
    """Port and token of the first rank's watch, as soon as it has said them."""
    deadline = time.monotonic() + JOIN * limit
    where = f"rank 0 of {place.world} at {place.address}, port {place.port}"
    while True:  # not torch's own wait, which cannot be interrupted
        try:
            socket.create_connection((str(place.address), int(place.port or 0)), timeout=2).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise Failure(
                    f"cannot reach {where}, for {JOIN * limit:.0f} s: {error.strerror or error}. Start it within that time; "
                    "is MASTER_ADDR its address, and does no firewall lie between?"
                ) from None
            time.sleep(0.2)
    store = _store(place, limit, serve=False)
    try:
        while not store.check([_key()]):
            if time.monotonic() > deadline:
                raise Failure(f"{where} has not begun within {JOIN * limit:.0f} s: see what it printed")
            time.sleep(0.1)
        port, token = json.loads(store.get(_key()))
    except (RuntimeError, ValueError) as error:
        if isinstance(error, Failure):
            raise
        raise Failure(f"what answers as {where} is not of this run ({first_line(error)}): choose another MASTER_PORT") from None
    return str(port), str(token)


def _key() -> str:
    """Of the store's entry; the agent of torchrun may keep one store over its restarts."""
    return f"cifar_lit/watch/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _store(place: RankInfo, limit: float, serve: bool) -> Any:
    """torch's store at the place's address, which the process group will use too.

    Made in a thread of its own, as it waits for ever for the answer of something that is no store.
    """
    from torch.distributed import TCPStore

    address, port, time_out = str(place.address), int(place.port or 0), timedelta(seconds=limit)
    if serve:
        _check_free(port)
    made: list[Any] = []

    def make() -> None:
        try:
            made.append(TCPStore(address, port, is_master=serve, timeout=time_out, wait_for_workers=False, multi_tenant=serve))
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


def _check_free(port: int) -> None:
    """Raises UsageError when another process listens on the port that all ranks are to meet at."""
    if busy(port):
        raise UsageError(
            f"port {port}, which MASTER_PORT names, is taken on this machine by another process: choose another, the same for all"
        )


def _avoid_busy_port() -> None:
    """On one machine nobody else needs to know the port: without MASTER_PORT Lightning takes a free one."""
    port = os.environ.get("MASTER_PORT", "")
    if not port.isdecimal() or busy(int(port)):
        os.environ.pop("MASTER_PORT", None)
