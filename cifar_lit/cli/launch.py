"""Apply the settings that torchrun, SLURM or a restarted job imply to a training command, and requeue SLURM's job.

Lightning requeues SLURM jobs and torchrun restarts processes, but neither finds the run folder of the previous attempt.
So a new run folder records its job and its command line.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, MutableMapping
from hashlib import sha256
from pathlib import Path

from cifar_lit.base.errors import UsageError
from cifar_lit.base.files import display_path
from cifar_lit.base.settings import plain_values
from cifar_lit.base.text import note
from cifar_lit.cli.flags import LOGS, SHORT, Command, recipe_path
from cifar_lit.run.resume import is_finished, newest_run_of_job

JOB_NAME = "CIFAR_LIT_JOB"  # set by the user or the scheduler; unique among the jobs that share --logs
PARENT = "CIFAR_LIT_PARENT"  # environment variable: the process that starts ranks
REQUEUE_SECONDS = 5.0  # time for SLURM to end a requeued job


def is_child() -> bool:
    """Return whether the parent of this process has started it as a rank."""
    return "LOCAL_RANK" in os.environ and os.environ.get(PARENT) == str(os.getppid())


def is_first_process(environment: Mapping[str, str]) -> bool:
    """Return whether this process has global rank 0, from the variables of torchrun, SLURM, Lightning or the user."""
    if "RANK" in environment:
        return environment["RANK"] == "0"
    return (environment.get("LOCAL_RANK", "0"), environment.get("NODE_RANK", "0")) == ("0", "0")


def by_torchrun(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in environment


def by_slurm(environment: Mapping[str, str]) -> bool:
    """Return whether SLURM's srun started this process, as Lightning decides it: no interactive shell, no torchrun."""
    if by_torchrun(environment):
        return False
    interactive = environment.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return "SLURM_NTASKS" in environment and not interactive


def apply_launcher(command: Command, environment: MutableMapping[str, str]) -> None:
    """Set devices and nodes to those that torchrun or SLURM started; raise UsageError if the flags contradict them.

    One SLURM task is one device. Lightning compares its settings with the job's variables, so these are set to the
    values of this job step, which may have fewer tasks. SLURM's ranks are also set under torchrun's names.
    """
    if command.asks_only:
        return
    if by_torchrun(environment):
        tasks, per_node = int(environment["WORLD_SIZE"]), int(environment["LOCAL_WORLD_SIZE"])
        restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0")
        # Restarted ranks would read the addresses of killed ones in the agent's store (pytorch/pytorch#135712).
        if tasks > 1 and restarts != "0" and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            raise UsageError("torchrun --max-restarts needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment")
    elif by_slurm(environment):
        tasks = int(environment["SLURM_NTASKS"])
        if tasks > 1 and "SLURM_STEP_ID" not in environment:
            raise UsageError(f"only one of the {tasks} tasks of this SLURM job runs: put srun before the command")
        nodes = environment.get("SLURM_STEP_NUM_NODES") or environment["SLURM_NNODES"]
        per_node = tasks // int(nodes)
        environment.update(SLURM_NTASKS_PER_NODE=str(per_node), SLURM_NNODES=nodes, WORLD_SIZE=str(tasks))
        environment.update(RANK=environment["SLURM_PROCID"], LOCAL_RANK=environment["SLURM_LOCALID"])
    else:
        return
    for flag, number in (("devices", per_node), ("nodes", tasks // per_node)):
        value = command.value(SHORT[flag])
        if value not in (None, "auto", "-1", str(number)):
            raise UsageError(f"--{flag} {value} contradicts the launcher, which started {number}: leave --{flag} out")
        command.flags.append(f"--{SHORT[flag]}={number}")


# ---- restarted jobs


def continue_job(command: Command, argv: list[str], environment: Mapping[str, str]) -> None:
    """Resume the run of a restarted job, as `--resume RUN` would. The folder of a new run records its job.

    The command line is part of the record, so that each training of a SLURM script finds its own run. If the run is
    finished, print this and exit with code 0.
    """
    if command.name not in ("fit", "train"):
        return
    if command.several or command.asks_only:
        return
    if command.resume is not None:
        return
    job = job_of(environment)
    if not job:
        return
    command.job = sha256("\0".join([job, command.name, *argv]).encode()).hexdigest()
    counters = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
    again = any(int(environment.get(counter, 0)) for counter in counters)
    if not again and JOB_NAME not in environment:
        return
    logs = logs_of(command)
    run = newest_run_of_job(logs, command.job)
    finished = False
    if run is None:
        line = f"job {job} has no checkpoint in {display_path(logs)} yet: starting a new run"
    elif is_finished(run, needs_test=command.name == "train"):
        finished = True
        line = f"{display_path(run)} of job {job} is finished: its results are in metrics.json"
    else:
        line = f"resuming {display_path(run)} of job {job}"
        command.configs = []
        command.recipe, command.logs, command.resume = None, str(run.parent), str(run)
    if is_first_process(environment):
        note(line)
    if finished:
        raise SystemExit(0)


def job_of(environment: Mapping[str, str]) -> str:
    """Return what identifies the job of a process also after a restart, empty without a scheduler."""
    if name := environment.get(JOB_NAME):
        return name
    if "SLURM_JOB_ID" in environment:
        return f"{environment.get('SLURM_CLUSTER_NAME', 'slurm')}:{slurm_number(environment)}"
    if by_torchrun(environment):
        run_id = environment["TORCHELASTIC_RUN_ID"]  # equal on all nodes; "none" without --rdzv-id
        if run_id == "none":
            run_id = str(os.getppid())
        return f"torchrun:{run_id}"
    return ""


def slurm_number(environment: Mapping[str, str]) -> str:
    """Return the number of the SLURM job as `scontrol` expects it: `<array>_<task>` in a job array."""
    if "SLURM_ARRAY_JOB_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment["SLURM_JOB_ID"]


def requeue(environment: Mapping[str, str], resume: str | None) -> str:
    """Ask SLURM to requeue this process's job, and return the line to print.

    SLURM ends the job at once, so everything must be saved before. All other ranks wait for SLURM: if one exited before
    the first rank, `srun --kill-on-bad-exit` could kill the first rank.
    resume: the command that resumes the run, None without a checkpoint.
    """
    if not is_first_process(environment):
        time.sleep(REQUEUE_SECONDS)
        return ""
    job = slurm_number(environment)
    note(f"cifar-lit: stopped; SLURM's job {job} is being requeued and will resume automatically")
    try:
        answer = subprocess.run(["scontrol", "requeue", job], capture_output=True, encoding="utf-8", check=False)
    except OSError as error:  # no scontrol in this container
        fault = error.strerror
    else:
        if answer.returncode == 0:
            return ""
        fault = answer.stderr.strip()
    return f"cifar-lit: `scontrol requeue {job}` failed: {fault}. Resume with:\n  {resume or 'the same command'}"


def logs_of(command: Command) -> Path:
    """Return the folder for run folders that a new training would use."""
    if command.logs is not None:
        return Path(command.logs).expanduser()
    files = [Path(config) for config in reversed(command.configs)]
    if command.recipe:
        files.append(recipe_path(command.recipe))
    for file in files:
        logs = plain_values(file.expanduser()).get("logs")
        if logs:
            return Path(logs).expanduser()
    return Path(LOGS).expanduser()
