"""A job that its scheduler starts again goes on with its run: which job this is, and which run belongs to it.

A job is known by a key: CIFAR_LIT_JOB if it is set, else SLURM's id of the job, else torchrun's of the run. A training's
folder records the key with a digest of the line, so that of several trainings in one SLURM script each finds its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from cifar_lit.cli.flags import LOGS, Command
from cifar_lit.distributed.launcher import by_torchrun, is_first_process
from cifar_lit.errors import UsageError
from cifar_lit.runs.config_file import plain_values
from cifar_lit.runs.run_folder import JOB, display_path, find_resumable, is_finished, run_of, runs_of_job

NAME = "CIFAR_LIT_JOB"  # set by a user or a scheduler's file; it must be unique among the jobs that share --logs
GRACE = 5.0  # seconds that SLURM is given to end a job that is queued again
DECIDED = "CIFAR_LIT_JOB_RUN"  # tells processes that this one starts what it has decided: a run, or "" for a new one


@dataclass(frozen=True)
class Job:
    """What a scheduler runs. key: its name for all time. title: for people. again: it was started before.

    named: by CIFAR_LIT_JOB, so that it may be an old acquaintance although nobody says that it was started before.
    """

    key: str
    title: str
    again: bool
    named: bool = False

    def __str__(self) -> str:
        return self.title


def job_of(environment: Mapping[str, str], parent: int, host: str) -> Job | None:
    """The job that a process of this environment belongs to, None outside one.

    parent, host: the process that started this one, and the machine; they tell torchruns without a run id apart.
    """
    again = any(int(environment.get(count) or 0) >= 1 for count in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))
    if name := environment.get(NAME):
        return Job(name, f"job {name}", again, named=True)
    if "SLURM_JOB_ID" in environment:
        number = slurm_number(environment)
        return Job(f"slurm:{environment.get('SLURM_CLUSTER_NAME', '')}:{number}", f"SLURM's job {number}", again)
    if by_torchrun(environment):
        run = environment["TORCHELASTIC_RUN_ID"]  # with it, as several nodes may change places; "none" where none was given
        return Job(f"torchrun:{run}" if run != "none" else f"torchrun:none:{parent}@{host}", "torchrun's job", again)
    return None


def slurm_number(environment: Mapping[str, str]) -> str:
    """The number of SLURM's job as its commands take it: of a task of an array with the array's."""
    if "SLURM_ARRAY_JOB_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment["SLURM_JOB_ID"]


def digest(name: str, words: list[str]) -> str:
    """Of a command and its words, to know a line by."""
    return sha256("\0".join([name, *words]).encode()).hexdigest()[:16]


def go_on(command: Command, words: list[str], environment: Mapping[str, str], parent: int, host: str) -> None:
    """Makes a training's command go on with the run of its job, as `--resume RUN` would, where there is one.

    Else its new run's folder will record the job. words: the line as it was typed. A line with a --resume of its own
    is left alone. Raises SystemExit(0), with a line that says so, when the run is finished, and UsageError when
    another line names the job whose recipe is another.
    """
    if command.name not in ("fit", "train") or command.asks_only:
        return
    job = job_of(environment, parent, host)
    if job is None:
        return
    first = is_first_process(environment)
    tests = command.name == "train"
    if command.resume is not None:
        if job.again:
            _end_if_finished(run_of(find_resumable(Path(command.logs or LOGS), command.resume or None)), job, first, tests)
        return
    record = {"job": job.key, "line": digest(command.name, words), "recipe": command.recipe}
    command.job = json.dumps(record) + "\n"
    if not (job.again or job.named):
        return
    logs = Path(_logs(command)).expanduser()
    run = _decided(logs, job, record, first, environment)
    os.environ[DECIDED] = str(run) if run else ""
    if run is not None:
        began = json.loads((run / JOB).read_text())
        if began.get("recipe") != command.recipe:
            recipe = began.get("recipe") or "that fits this machine"
            raise UsageError(
                f"{display_path(run)} of {job} began with the recipe {recipe}: keep to it, or give {NAME} another value"
            )
        _end_if_finished(run, job, first, tests)
        if first:
            reason = "was started again" if job.again else "has a run"
            print(f"going on with {display_path(run)}: {job} {reason}", file=sys.stderr, flush=True)
        _resume(command, run, same_line=began.get("line") == record["line"])
    elif job.again and first:
        print(
            f"{job} was started again, but has no checkpoint in {display_path(logs)} yet: starting anew",
            file=sys.stderr,
            flush=True,
        )


def _decided(logs: Path, job: Job, record: Mapping[str, Any], first: bool, environment: Mapping[str, str]) -> Path | None:
    """The run to go on with, None for a new one; what a process that started this one has decided holds."""
    if not first and DECIDED in environment:
        return Path(environment[DECIDED]) if environment[DECIDED] else None

    def belongs(other: Mapping[str, Any]) -> bool:
        return other.get("job") == job.key and (job.named or other.get("line") == record["line"])

    return next(iter(runs_of_job(logs, belongs)), None)


def _end_if_finished(run: Path | None, job: Job, first: bool, tests: bool) -> None:
    if run is None or not is_finished(run, needs_test=tests):
        return
    if first:
        results = display_path(run / "metrics.json")
        print(f"{display_path(run)} is finished: its results are in {results}, and {job} has nothing left to do")
    raise SystemExit(0)


def _resume(command: Command, run: Path, same_line: bool) -> None:
    """Turns a line into one that resumes a run, whose config.yaml holds what files and searches gave at its beginning."""
    if same_line:
        command.configs = []
    for found, flag in (("batch", "data.batch_size"), ("lr", "model.lr")):
        if found in command.auto:
            command.flags = command.without(flag)
    command.auto, command.recipe = set(), None
    command.logs, command.resume = str(run.parent), str(run)


def _logs(command: Command) -> str:
    """The folder of runs that a new training of this line would use."""
    if command.logs:
        return command.logs
    for config in reversed(command.configs):
        values = plain_values(Path(config).expanduser())
        if isinstance(values, dict) and values.get("logs"):
            return str(values["logs"])
    return LOGS


def requeued(environment: Mapping[str, str], resume: str | None) -> str:
    """Asks SLURM to start this process's job again; a line about what went wrong, empty when nothing did.

    resume: the command that goes on, None when there is no checkpoint. SLURM ends the job at once, so everything must be
    written by now, the line that says so as well. Signals are not heeded any more. Processes but the first wait for
    that end: were they gone before, `srun --kill-on-bad-exit` could take the first one with them.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if not is_first_process(environment):
        time.sleep(GRACE)
        return ""
    job = slurm_number(environment)
    state = "stopped at its checkpoint" if resume else "stopped"
    print(f"cifar-lit: {state}; SLURM's job {job} is queued again, and will go on by itself", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60, check=False)
        reason = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = getattr(error, "strerror", None) or "it did not answer within 60 s"
    if not reason:
        return ""
    hint = f"Go on with:\n  {resume}" if resume else "Start it again."
    return f"cifar-lit: it is not, as `scontrol requeue {job}` failed: {reason}. {hint}"
