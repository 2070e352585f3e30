"""Find the run of a job that its scheduler restarts, and requeue the job.

Lightning requeues SLURM jobs and torchrun restarts processes, but neither finds the run folder of the previous attempt.
A job is identified by a key: CIFAR_LIT_JOB if it is set, else SLURM's job id, else torchrun's run id. A new run folder
records the key and a digest of the command line, so that each training of a SLURM script finds its own run.
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
from cifar_lit.runs.run_folder import newest_run_of_job
from cifar_lit.signals import REQUEUE, STOP_SIGNALS
from cifar_lit.text import note

NAME = "CIFAR_LIT_JOB"  # set by the user or the scheduler; unique among the jobs that share --logs
JOB_RUN = "CIFAR_LIT_JOB_RUN"  # tells child processes which run to resume; empty for a new run
REQUEUE_SECONDS = 5.0  # time for SLURM to end a requeued job


class Job(NamedTuple):
    """A job of a scheduler."""

    key: str  # the same after a restart
    title: str  # for messages
    again: bool  # restarted, according to the scheduler
    named: bool = False  # by CIFAR_LIT_JOB: a run may already exist even without a restart counter


def job_of(environment: Mapping[str, str]) -> Job | None:
    """Return the job that a process with these environment variables belongs to, or None."""
    counters = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
    again = any(int(environment.get(counter) or 0) >= 1 for counter in counters)
    if name := environment.get(NAME):
        return Job(name, f"job {name}", again, named=True)
    if "SLURM_JOB_ID" in environment:
        number = slurm_number(environment)
        return Job(f"slurm:{environment.get('SLURM_CLUSTER_NAME', '')}:{number}", f"SLURM's job {number}", again)
    if by_torchrun(environment):
        run_id = environment["TORCHELASTIC_RUN_ID"]  # equal on all nodes; "none" without --rdzv-id
        if run_id == "none":
            run_id = f"none:{os.getppid()}@{platform.node()}"
        return Job(f"torchrun:{run_id}", "torchrun's job", again)
    return None


def slurm_number(environment: Mapping[str, str]) -> str:
    """Return the number of the SLURM job as `scontrol` expects it: `<array>_<task>` in a job array."""
    if "SLURM_ARRAY_JOB_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment["SLURM_JOB_ID"]


def run_of_job(logs: Path, job: Job, line: str, environment: Mapping[str, str]) -> Path | None:
    """Return the run to resume, the same in all processes, or None for a new run. line: digest of the command line."""
    if not is_first_process(environment) and JOB_RUN in environment:
        if not environment[JOB_RUN]:
            return None
        return Path(environment[JOB_RUN])

    def is_of_job(record: Mapping[str, object]) -> bool:
        return record.get("job") == job.key and (job.named or record.get("line") == line)

    run = newest_run_of_job(logs, is_of_job)
    os.environ[JOB_RUN] = str(run or "")
    return run


def requeue(environment: Mapping[str, str], resume: str | None) -> str:
    """Ask SLURM to requeue this process's job, and return an error message, empty on success.

    SLURM ends the job at once. So everything must be saved before, and stop signals are ignored from here on. All other
    ranks wait for SLURM: if one exited before the first rank, `srun --kill-on-bad-exit` could kill the first rank.
    resume: the command that resumes the run, None without a checkpoint.
    """
    for number in filter(None, (*STOP_SIGNALS, REQUEUE)):
        signal.signal(number, signal.SIG_IGN)
    if not is_first_process(environment):
        time.sleep(REQUEUE_SECONDS)
        return ""
    job = slurm_number(environment)
    state, hint = "stopped", "Start it again."
    if resume:
        state, hint = "stopped at its checkpoint", f"Resume with:\n  {resume}"
    note(f"cifar-lit: {state}; SLURM's job {job} is being requeued and will resume automatically")
    try:
        subprocess.run(["scontrol", "requeue", job], capture_output=True, encoding="utf-8", timeout=60, check=True)
        return ""
    except (OSError, subprocess.SubprocessError) as error:
        output = str(getattr(error, "stderr", None) or error).strip()
    return f"cifar-lit: requeueing failed: `scontrol requeue {job}`: {output.splitlines()[-1].rstrip('.')}. {hint}"
