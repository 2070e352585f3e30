"""Processes that torchrun has started: who they are, and how they tell the first one what they found."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from cifar_lit.errors import Failure

AGENT = "TORCHELASTIC_USE_AGENT_STORE"  # whether torchrun itself serves the store at MASTER_ADDR:MASTER_PORT


class Job(NamedTuple):
    """This process among all that torchrun has started, `local_size` of them on each machine; node: the machine's number."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Job | None:
        """What torchrun says, None where it has not started this process."""
        if "TORCHELASTIC_RUN_ID" not in environment or "LOCAL_WORLD_SIZE" not in environment:
            return None
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
        return cls(*(int(environment[name]) for name in names))


class Board:
    """What the processes tell each other over torchrun's store, or over one in the first process where torchrun has none.

    limit: seconds to wait for what another process has not told yet. Raises Failure when the store cannot be reached.
    """

    def __init__(self, job: Job, environment: Mapping[str, str], limit: float) -> None:
        from torch.distributed import TCPStore

        self._rank, self._limit = job.rank, limit
        self._prefix = f"cifar-lit/check/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        serves = job.rank == 0 and environment.get(AGENT) != "True"
        try:
            self._store = TCPStore(address, port, is_master=serves, timeout=timedelta(seconds=limit), wait_for_workers=False)
        except RuntimeError as error:
            line = str(error).partition("\n")[0]
            raise Failure(f"process {job.rank} cannot reach the others at {address}:{port} in {limit:g} s: {line}") from None
        self.environment = {AGENT: "True"}  # for a probe, which must not serve another one there

    def post(self, name: str, what: Any) -> None:
        """Tells the others."""
        self._store.set(f"{self._prefix}/{name}/{self._rank}", json.dumps(what))

    def read(self, name: str, ranks: Iterable[int]) -> dict[int, Any]:
        """What ranks have told, None for those that have not when the limit has passed."""
        deadline = time.monotonic() + self._limit
        found: dict[int, Any] = {}
        for rank in ranks:
            key = f"{self._prefix}/{name}/{rank}"
            try:
                self._store.wait([key], timedelta(seconds=max(0.1, deadline - time.monotonic())))
                found[rank] = json.loads(self._store.get(key))
            except RuntimeError:
                found[rank] = None
        return found
