"""Where the processes that torchrun starts again meet: at a port that the first of them opens anew.

torchrun lets all attempts meet at the agent's store, where the addresses that an earlier attempt left are still found;
who reads them too early cannot connect (github.com/pytorch/pytorch/issues/135712, and seen with torch 2.15). Its count
of restarts does not tell attempts apart on several nodes, as each node counts its own. So they agree on both by a
handshake that nothing of an earlier attempt can answer.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import MutableMapping
from datetime import timedelta
from typing import Any, Protocol

from cifar_lit.distributed.launcher import by_torchrun
from cifar_lit.distributed.network import free_port
from cifar_lit.errors import Failure

LIMIT = 300.0  # seconds; processes come late where starting takes long
PAUSE = 0.02


class Store(Protocol):
    """What is needed of torch.distributed.Store."""

    def set(self, key: str, value: str) -> None: ...  # noqa: D102
    def get(self, key: str) -> bytes: ...  # noqa: D102
    def check(self, keys: list[str]) -> bool: ...  # noqa: D102


def meet_anew(environment: MutableMapping[str, str]) -> None:
    """Moves the meeting point of a torchrun that may have started processes before; else nothing changes.

    Raises Failure when not all processes come within the limit.
    """
    if not by_torchrun(environment) or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    world, here = int(environment["WORLD_SIZE"]), int(environment["LOCAL_WORLD_SIZE"])
    if world == 1 or (world == here and environment.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"):
        return
    from torch.distributed import TCPStore

    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=LIMIT))
    restarts = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    port, restarts = agree(store, int(environment["RANK"]), world, restarts, LIMIT)
    environment["MASTER_PORT"], environment["TORCHELASTIC_USE_AGENT_STORE"] = str(port), "False"
    environment["TORCHELASTIC_RESTART_COUNT"] = str(restarts)


def agree(store: Store, rank: int, world: int, restarts: int, limit: float) -> tuple[int, int]:
    """The port at which `world` processes of one attempt meet, free on the machine of rank 0, and how often they were
    started again: by the highest of their counts, and at least once where an earlier attempt has come this far.

    Called by each of them. Each further process says hello with a token of its own until the first one answers that it
    has heard it, and confirms; when all have, the first one says what holds. Raises Failure after `limit` seconds.
    """
    own = uuid.uuid4().hex
    deadline = time.monotonic() + limit

    def read(key: str) -> Any:
        return json.loads(store.get(f"cifar_lit/{key}")) if store.check([f"cifar_lit/{key}"]) else None

    def say(key: str, value: Any) -> None:
        store.set(f"cifar_lit/{key}", json.dumps(value))

    if rank > 0:
        say(f"hello/{rank}", [own, restarts])
        while own not in ((answer := read("answer")) or {"heard": []})["heard"]:
            _wait(deadline, limit)
        say(f"confirmed/{rank}", answer["token"])
        while (last := read("agreed") or {}).get("token") != answer["token"]:
            _wait(deadline, limit)
        return last["port"], last["restarts"]
    before: list[Any] = []
    while any(read(f"confirmed/{other}") != own for other in range(1, world)):
        hellos = [read(f"hello/{other}") or ["", 0] for other in range(1, world)]
        if hellos != before:
            say("answer", {"token": own, "heard": [token for token, _ in hellos]})
            before = hellos
        _wait(deadline, limit)
    counts = [restarts, *(read(f"hello/{other}")[1] for other in range(1, world)), int(read("agreed") is not None)]
    found = {"token": own, "port": free_port(), "restarts": max(counts)}
    say("agreed", found)
    return found["port"], found["restarts"]


def _wait(deadline: float, limit: float) -> None:
    if time.monotonic() > deadline:
        raise Failure(f"process {os.getpid()} has waited {limit:.0f} s for the others of this run: see what they printed")
    time.sleep(PAUSE)
