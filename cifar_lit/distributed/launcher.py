"""Who started the processes of a run: torchrun, SLURM's srun, a user on each of several nodes, or the run itself.

Pure functions of the environment and the line, but for `apply_slurm`, which translates SLURM's variables into everybody's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping

from cifar_lit.cli.flags import SHORT, Command
from cifar_lit.errors import UsageError


def is_first_process(environment: Mapping[str, str]) -> bool:
    """Whether this process is the first of all, from what torchrun, SLURM, Lightning or the user of several nodes set."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return environment["RANK"] == "0"
    return environment.get("LOCAL_RANK", "0") == "0" and environment.get("NODE_RANK", "0") == "0"


def by_torchrun(environment: Mapping[str, str]) -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in environment and "LOCAL_WORLD_SIZE" in environment


def starts_again(environment: Mapping[str, str]) -> bool:
    """Whether torchrun will start the processes again when one of them fails."""
    count, most = (int(environment.get(f"TORCHELASTIC_{name}") or 0) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return count < most


def advice(resume: str | None, environment: Mapping[str, str]) -> str:
    """How a run that lost a process goes on. resume: the command for it, None where there is no checkpoint."""
    if starts_again(environment):
        return "torchrun starts all of them again."
    return f"Go on with:\n  {resume}" if resume else "It has no checkpoint yet: start it again."


def by_slurm(environment: Mapping[str, str]) -> bool:
    """Whether this process belongs to a SLURM job as Lightning sees it: not to an interactive shell, nor to torchrun."""
    interactive = environment.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return "SLURM_NTASKS" in environment and not interactive and not by_torchrun(environment)


def apply_torchrun(command: Command, environment: Mapping[str, str]) -> None:
    """Takes devices and nodes from torchrun's environment, which has started the processes already.

    Raises UsageError when the flags ask for something else. Without torchrun nothing changes.
    """
    if not by_torchrun(environment):
        return
    here, everywhere = int(environment["LOCAL_WORLD_SIZE"]), int(environment["WORLD_SIZE"])
    _take(command, "torchrun", here, "--nproc-per-node", everywhere // here, "--nnodes")


def apply_slurm(command: Command, environment: MutableMapping[str, str]) -> None:
    """Takes devices and nodes from SLURM's environment, one task being one device.

    The ranks become known by the names that torchrun gives them too, and the variables that Lightning compares with are
    made those of this step: a step may have fewer tasks than the job. Raises UsageError when the flags ask for something
    else, when nodes have different numbers of tasks, and when the tasks were never started. Without SLURM nothing changes.
    """
    if not by_slurm(environment) or command.asks_only:
        return
    tasks = int(environment["SLURM_NTASKS"])
    if tasks > 1 and "SLURM_STEP_ID" not in environment:
        raise UsageError(f"this SLURM job has {tasks} tasks, but only one of them runs: put srun before the command")
    shares = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE") or str(tasks)
    each = {int(count) for count in re.sub(r"\(x\d+\)", "", shares).split(",")}
    if len(each) > 1:
        raise UsageError(f"SLURM started {shares} tasks on its nodes, which must be as many on each: use --ntasks-per-node")
    here = min(each.pop(), tasks)
    _take(command, "SLURM", here, "--ntasks-per-node", tasks // here, "--nodes")
    environment["SLURM_NTASKS_PER_NODE"], environment["SLURM_NNODES"] = str(here), str(tasks // here)
    ranks = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "NODE_RANK": "SLURM_NODEID", "WORLD_SIZE": "SLURM_NTASKS"}
    environment.update({name: environment[theirs] for name, theirs in ranks.items()})


def _take(command: Command, launcher: str, here: int, per_node: str, nodes: int, of_nodes: str) -> None:
    for flag, number, option in (("trainer.devices", here, per_node), ("trainer.num_nodes", nodes, of_nodes)):
        asked = command.value(flag)
        if asked is not None and asked not in ("auto", "-1", str(number)):
            short = next(name for name, long in SHORT.items() if long == flag)
            raise UsageError(
                f"--{short} {asked} contradicts {launcher}, which started {number} ({option}): "
                f"leave --{short} out or make them agree"
            )
        command.flags.append(f"--{flag}={number}")
