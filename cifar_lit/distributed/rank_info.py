"""Which of a run's processes this one is, and who has started them: torchrun, SLURM's srun, the user, or the Trainer.

Lightning's cluster environments know a process's rank once there is a Trainer. Here it is needed before: the line says how many
devices there are, the first process claims the run folder and speaks, and ranks watch each other while data are prepared.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from cifar_lit.errors import UsageError

COORDINATOR = (
    "CIFAR_LIT_COORDINATOR"  # tells ranks that another one's Trainer starts where the first one's watch listens
)


class RankInfo(NamedTuple):
    """One of `world` processes, counted over all machines.

    address, port: of the first one's store; None when it is for the Trainer to choose, which starts all others itself, on this
    machine. per_node: how many ranks of each machine its first one starts, itself included. parent: the process number of the
    torchrun agent that has started this process, if one has.
    """

    rank: int
    world: int
    address: str | None = None
    port: int | None = None
    per_node: int = 1
    parent: int | None = None


def rank_info(devices: int, nodes: int) -> RankInfo:
    """This process's rank in a run on `devices` devices of each of `nodes` machines.

    Raises:
        UsageError: when there are several machines, and nothing says how they reach the first.
    """
    from lightning.fabric.plugins import environments as known

    # in the Trainer's order: torchrun may run inside a job of SLURM
    for kind in (known.TorchElasticEnvironment, known.SLURMEnvironment, known.LSFEnvironment, known.MPIEnvironment):
        if kind.detect():
            cluster = kind()
            parent = os.getppid() if kind is known.TorchElasticEnvironment else None
            return RankInfo(
                cluster.global_rank(), cluster.world_size(), cluster.main_address, cluster.main_port, parent=parent
            )
    own = known.LightningEnvironment()
    rank, world = own.node_rank() * devices + own.local_rank(), devices * nodes
    by_hand = "LOCAL_RANK" in os.environ and COORDINATOR not in os.environ
    if world == 1 or (nodes == 1 and not by_hand):
        return RankInfo(rank, world, per_node=devices)
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
    return RankInfo(rank, world, os.environ["MASTER_ADDR"], int(port), per_node=1 if by_hand else devices)


def is_first_process(environment: Mapping[str, str]) -> bool:
    """Whether this process is the first of all, from what torchrun, SLURM, Lightning or the user of several nodes set."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return environment["RANK"] == "0"
    return environment.get("LOCAL_RANK", "0") == "0" and environment.get("NODE_RANK", "0") == "0"


def by_torchrun(environment: Mapping[str, str]) -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in environment and "LOCAL_WORLD_SIZE" in environment


def by_slurm(environment: Mapping[str, str]) -> bool:
    """Whether this process belongs to a SLURM job as Lightning sees it: not to an interactive shell, nor to torchrun."""
    interactive = environment.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return "SLURM_NTASKS" in environment and not interactive and not by_torchrun(environment)


def starts_again(environment: Mapping[str, str]) -> bool:
    """Whether torchrun will start the processes again when one of them fails."""
    restarts, max_restarts = (
        int(environment.get(f"TORCHELASTIC_{name}") or 0) for name in ("RESTART_COUNT", "MAX_RESTARTS")
    )
    return restarts < max_restarts


def advice(resume: str | None, environment: Mapping[str, str]) -> str:
    """How a run that lost a process goes on. resume: the command, None where there is no checkpoint."""
    if starts_again(environment):
        return "torchrun starts all of them again."
    return f"Go on with:\n  {resume}" if resume else "It has no checkpoint yet: start it again."
