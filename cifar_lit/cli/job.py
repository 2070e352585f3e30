"""A job that its scheduler starts again goes on with its run: which job this is, and which run belongs to it.

A job is known by a key: CIFAR_LIT_JOB if it is set, else SLURM's id of the job, else torchrun's of the run. A training's
folder records the key with a digest of the line, so that of several trainings in one SLURM script each finds its own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from cifar_lit.cli.flags import LOGS, Command
from cifar_lit.cli.launched import by_torchrun, is_first_process
from cifar_lit.errors import UsageError
from cifar_lit.results.plain_yaml import plain_values
from cifar_lit.results.run_folder import JOB, find_resumable, is_finished, run_of, runs_of_job, shown

NAME = "CIFAR_LIT_JOB"  # set by a user or a scheduler's file; it must be unique among the jobs that share --logs
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
        number = environment["SLURM_JOB_ID"]
        if "SLURM_ARRAY_JOB_ID" in environment:
            number = f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
        return Job(f"slurm:{environment.get('SLURM_CLUSTER_NAME', '')}:{number}", f"SLURM's job {number}", again)
    if by_torchrun(environment):
        run = environment["TORCHELASTIC_RUN_ID"]  # with it, as several nodes may change places; "none" where none was given
        return Job(f"torchrun:{run}" if run != "none" else f"torchrun:none:{parent}@{host}", "torchrun's job", again)
    return None


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
    _end_if_finished(run, job, first, tests)
    if run is not None:
        if first:
            reason = "was started again" if job.again else "has a run"
            print(f"going on with {shown(run)}: {job} {reason}", file=sys.stderr, flush=True)
        _resume(command, run, record)
    elif job.again and first:
        print(f"{job} was started again, but has no checkpoint in {shown(logs)} yet: starting anew", file=sys.stderr, flush=True)


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
        print(f"{shown(run)} is finished: its results are in {shown(run / 'metrics.json')}, and {job} has nothing left to do")
    raise SystemExit(0)


def _resume(command: Command, run: Path, record: Mapping[str, Any]) -> None:
    """Turns the line that began a run into one that resumes it: its config.yaml holds what files and searches gave."""
    began = json.loads((run / JOB).read_text())
    if began.get("recipe") != record["recipe"]:
        raise UsageError(
            f"{shown(run)} of job {record['job']} began with the recipe {began.get('recipe') or 'that fits this machine'}: "
            f"keep to it, or give {NAME} another value"
        )
    if began.get("line") == record["line"]:
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
