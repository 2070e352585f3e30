"""Where a process stands among those of its run, from what torchrun, SLURM, Lightning's launcher or the user has set."""

from __future__ import annotations

import os
from typing import NamedTuple

from cifar_lit.errors import UsageError

HUB = "CIFAR_LIT_HUB"  # tells ranks that the first one's Trainer starts where its watch listens


class RankInfo(NamedTuple):
    """One of `world` processes, counted over all machines.

    address, port: where the first one's store answers; None when it is to be found by the Trainer, which starts all others
    itself, on this machine. each: how many ranks of each machine its first one starts, itself included. parent: the agent
    of torchrun that has started this process, if one has.
    """

    rank: int
    world: int
    address: str | None = None
    port: int | None = None
    each: int = 1
    parent: int | None = None


def rank_info(devices: int, nodes: int) -> RankInfo:
    """This process's place in a run on `devices` devices of each of `nodes` machines.

    Raises UsageError when there are several machines, and nothing says how they reach the first.
    """
    from lightning.fabric.plugins import environments as known

    # in the Trainer's order: torchrun may run inside a job of SLURM
    for kind in (known.TorchElasticEnvironment, known.SLURMEnvironment, known.LSFEnvironment, known.MPIEnvironment):
        if kind.detect():
            found = kind()
            parent = os.getppid() if kind is known.TorchElasticEnvironment else None
            return RankInfo(found.global_rank(), found.world_size(), found.main_address, found.main_port, parent=parent)
    own = known.LightningEnvironment()
    local, node = own.local_rank(), own.node_rank()
    rank, world = node * devices + local, devices * nodes
    by_hand = "LOCAL_RANK" in os.environ and HUB not in os.environ
    if world == 1 or (nodes == 1 and not by_hand):
        return RankInfo(rank, world, each=devices)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if nodes > 1 and {"NODE_RANK", "GROUP_RANK"}.isdisjoint(os.environ):
        missing.append("NODE_RANK")
    if missing:
        what, last = (f"--nodes {nodes}", nodes - 1) if nodes > 1 else (f"--devices {devices} with LOCAL_RANK", 0)
        raise UsageError(
            f"{what} needs {', '.join(missing)} in the environment of each machine, as in "
            f"MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 NODE_RANK=0 (to {last}) cifar-lit …, or torchrun or SLURM to start it"
        )
    port = os.environ["MASTER_PORT"]
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"MASTER_PORT must be a port from 1 to 65535, not {port!r}")
    return RankInfo(rank, world, os.environ["MASTER_ADDR"], int(port), each=1 if by_hand else devices)
