"""A job that its scheduler starts again goes on with its run: which job this is, which run belongs to it, and how it is requeued.

Lightning requeues a SLURM job too, from a checkpoint in the folder in which the job began; torchrun starts processes again and
leaves the rest to them. Neither finds the run folder of an earlier attempt.

A job is known by a key: CIFAR_LIT_JOB if it is set, else SLURM's id of the job, else torchrun's of the run. A training's
folder records the key with a digest of the line, so that of several trainings in one SLURM script each finds its own.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from cifar_lit.distributed.rank_info import by_torchrun, is_first_process
from cifar_lit.runs.run_folder import runs_of_job
from cifar_lit.signals import STOP_SIGNALS
from cifar_lit.text import note

NAME = "CIFAR_LIT_JOB"  # set by a user or a scheduler's file; it must be unique among the jobs that share --logs
JOB_RUN = "CIFAR_LIT_JOB_RUN"  # tells processes that this one starts which run it goes on with, "" for a new one
REQUEUE_SECONDS = 5.0  # that SLURM is given to end a job that is queued again


class Job(NamedTuple):
    """What a scheduler runs. key: its name for all time. title: for people. again: it was started before.

    named: by CIFAR_LIT_JOB, so that it may be an old acquaintance although nobody says that it was started before.
    """

    key: str
    title: str
    again: bool
    named: bool = False


def job_of(environment: Mapping[str, str]) -> Job | None:
    """The job that a process of this environment belongs to, None outside one."""
    again = any(
        int(environment.get(count) or 0) >= 1 for count in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
    )
    if name := environment.get(NAME):
        return Job(name, f"job {name}", again, named=True)
    if "SLURM_JOB_ID" in environment:
        number = slurm_number(environment)
        return Job(f"slurm:{environment.get('SLURM_CLUSTER_NAME', '')}:{number}", f"SLURM's job {number}", again)
    if by_torchrun(environment):
        run = environment[
            "TORCHELASTIC_RUN_ID"
        ]  # the same on all nodes, which may change places; "none" where none was given
        return Job(
            f"torchrun:{run}" + (f":{os.getppid()}@{platform.node()}" if run == "none" else ""), "torchrun's job", again
        )
    return None


def slurm_number(environment: Mapping[str, str]) -> str:
    """The number of SLURM's job as its commands take it: of a task of an array with the array's."""
    if "SLURM_ARRAY_JOB_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment["SLURM_JOB_ID"]


def run_of_job(logs: Path, job: Job, line: str, environment: Mapping[str, str]) -> Path | None:
    """The run to go on with, None for a new one: the same in all processes. line: its digest."""
    if not is_first_process(environment) and JOB_RUN in environment:
        return Path(environment[JOB_RUN]) if environment[JOB_RUN] else None
    runs = runs_of_job(logs, lambda record: record.get("job") == job.key and (job.named or record.get("line") == line))
    os.environ[JOB_RUN] = str(runs[0]) if runs else ""
    return runs[0] if runs else None


def requeue(environment: Mapping[str, str], resume: str | None) -> str:
    """Asks SLURM to start this process's job again; a line about what went wrong, empty when nothing did.

    SLURM ends the job at once, so everything must be written by now, and signals count no more. Processes but the first wait
    for that end: were they gone before, `srun --kill-on-bad-exit` could take the first one with them.

    Args:
        resume: the command that goes on, None when there is no checkpoint.
    """
    for number in (*STOP_SIGNALS, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if not is_first_process(environment):
        time.sleep(REQUEUE_SECONDS)
        return ""
    job = slurm_number(environment)
    state = "stopped at its checkpoint" if resume else "stopped"
    note(f"cifar-lit: {state}; SLURM's job {job} is queued again, and will go on by itself")
    try:
        subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60, check=True)
        return ""
    except (OSError, subprocess.SubprocessError) as error:
        output = str(getattr(error, "stderr", None) or error).strip()
    hint = f"Go on with:\n  {resume}" if resume else "Start it again."
    return f"cifar-lit: it is not, as `scontrol requeue {job}` failed: {output.splitlines()[-1].rstrip('.')}. {hint}"
