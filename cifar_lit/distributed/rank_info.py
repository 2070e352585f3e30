"""Determine the rank of this process, whether it was started by torchrun, SLURM, the user or the Trainer.

Lightning's cluster environments know the rank once there is a Trainer. This program needs the rank earlier: only the
first rank creates the run folder and prints, and ranks watch each other while data is prepared.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from cifar_lit.errors import UsageError

COORDINATOR = "CIFAR_LIT_COORDINATOR"  # address, port and token of the first rank's watch, for child processes


class RankInfo(NamedTuple):
    """One of `world` processes, counted over all machines."""

    rank: int
    world: int
    # Address of the first rank's store; None if the Trainer starts all ranks on this machine.
    address: str | None = None
    port: int | None = None
    per_node: int = 1  # ranks that the first process of each machine starts, itself included
    parent: int | None = None  # process id of the torchrun agent that started this process


def rank_info(devices: int, nodes: int) -> RankInfo:
    """Return the rank of this process in a run on `devices` devices of each of `nodes` machines.

    Raise UsageError if the environment does not say how to reach the first machine.
    """
    from lightning.fabric.plugins import environments

    # Order of the Trainer: torchrun may run inside a SLURM job.
    for name in ("TorchElastic", "SLURM", "LSF", "MPI"):
        kind = getattr(environments, f"{name}Environment")
        if kind.detect():
            cluster = kind()
            info = RankInfo(cluster.global_rank(), cluster.world_size(), cluster.main_address, cluster.main_port)
            if name == "TorchElastic":
                info = info._replace(parent=os.getppid())
            return info
    own = environments.LightningEnvironment()
    rank, world = own.node_rank() * devices + own.local_rank(), devices * nodes
    started_by_user = "LOCAL_RANK" in os.environ and COORDINATOR not in os.environ
    if world == 1 or (nodes == 1 and not started_by_user):
        return RankInfo(rank, world, per_node=devices)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if nodes > 1 and {"NODE_RANK", "GROUP_RANK"}.isdisjoint(os.environ):
        missing.append("NODE_RANK")
    if missing:
        what = f"--devices {devices} with LOCAL_RANK"
        if nodes > 1:
            what = f"--nodes {nodes}"
        raise UsageError(
            f"{what} needs {', '.join(missing)} in the environment of each machine. Start it with "
            f"MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 NODE_RANK=0 (to {nodes - 1}) cifar-lit …, "
            "or use torchrun or SLURM."
        )
    text = os.environ["MASTER_PORT"]
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise UsageError(f"MASTER_PORT must be a port from 1 to 65535, not {text!r}")
    info = RankInfo(rank, world, os.environ["MASTER_ADDR"], int(text))
    if not started_by_user:
        info = info._replace(per_node=devices)
    return info


def is_first_process(environment: Mapping[str, str]) -> bool:
    """Return whether this process has global rank 0, from the variables of torchrun, SLURM, Lightning or the user."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return environment["RANK"] == "0"
    return environment.get("LOCAL_RANK", "0") == "0" and environment.get("NODE_RANK", "0") == "0"


def by_torchrun(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in environment and "LOCAL_WORLD_SIZE" in environment


def by_slurm(environment: Mapping[str, str]) -> bool:
    """Return whether SLURM's srun started this process, as Lightning decides it: no interactive shell, no torchrun."""
    interactive = environment.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return "SLURM_NTASKS" in environment and not interactive and not by_torchrun(environment)


def starts_again(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun will restart the processes if one of them fails."""
    restarts = int(environment.get("TORCHELASTIC_RESTART_COUNT") or 0)
    return restarts < int(environment.get("TORCHELASTIC_MAX_RESTARTS") or 0)


def advice(resume: str | None, environment: Mapping[str, str]) -> str:
    """Return how to resume a run that lost a process. resume: the command, None without a checkpoint."""
    if starts_again(environment):
        return "torchrun restarts all ranks."
    if not resume:
        return "It has no checkpoint yet: start it again."
    return f"Resume with:\n  {resume}"
