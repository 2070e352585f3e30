"""What a training's line becomes when torchrun or SLURM has started it, or a scheduler starts its job again."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, MutableMapping
from hashlib import sha256
from pathlib import Path

from cifar_lit import text
from cifar_lit.cli.flags import LOGS, SHORT, Command, recipe_path
from cifar_lit.distributed.job import NAME, Job, job_of, run_of_job
from cifar_lit.distributed.rank_info import by_slurm, by_torchrun, is_first_process
from cifar_lit.errors import UsageError
from cifar_lit.runs.config_file import plain_values
from cifar_lit.runs.run_folder import JOB, display_path, find_resumable, is_finished, run_of


def apply_launcher(command: Command, environment: MutableMapping[str, str]) -> None:
    """Takes devices and nodes from torchrun or SLURM, which has started the processes already; raises UsageError for others.

    One task of SLURM is one device. Its ranks become known by the names that torchrun gives them too, and the variables that
    Lightning compares with are made those of this step: a step may have fewer tasks than the job.
    """
    if by_torchrun(environment):
        here, world = int(environment["LOCAL_WORLD_SIZE"]), int(environment["WORLD_SIZE"])
        _set_devices(command, "torchrun", here, "--nproc-per-node", world // here, "--nnodes")
        return
    if not by_slurm(environment) or command.asks_only:
        return
    tasks = int(environment["SLURM_NTASKS"])
    if tasks > 1 and "SLURM_STEP_ID" not in environment:
        raise UsageError(f"this SLURM job has {tasks} tasks, but only one of them runs: put srun before the command")
    counts = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE") or str(tasks)
    per_node = {int(count) for count in re.sub(r"\(x\d+\)", "", counts).split(",")}
    if len(per_node) > 1:
        raise UsageError(
            f"SLURM started {counts} tasks on its nodes, which must be as many on each: use --ntasks-per-node"
        )
    here = min(per_node.pop(), tasks)
    _set_devices(command, "SLURM", here, "--ntasks-per-node", tasks // here, "--nodes")
    environment["SLURM_NTASKS_PER_NODE"], environment["SLURM_NNODES"] = str(here), str(tasks // here)
    ranks = {
        "RANK": "SLURM_PROCID",
        "LOCAL_RANK": "SLURM_LOCALID",
        "NODE_RANK": "SLURM_NODEID",
        "WORLD_SIZE": "SLURM_NTASKS",
    }
    environment.update({name: environment[slurm_name] for name, slurm_name in ranks.items()})


def _set_devices(command: Command, launcher: str, here: int, per_node: str, nodes: int, of_nodes: str) -> None:
    for flag, number, option in (("trainer.devices", here, per_node), ("trainer.num_nodes", nodes, of_nodes)):
        value = command.value(flag)
        if value is not None and value not in ("auto", "-1", str(number)):
            short = next(name for name, long in SHORT.items() if long == flag)
            reason = f"contradicts {launcher}, which started {number} ({option})"
            raise UsageError(f"--{short} {value} {reason}: leave --{short} out or make them agree")
        command.flags.append(f"--{flag}={number}")


def continue_job(command: Command, argv: list[str], environment: Mapping[str, str]) -> None:
    """Makes a training's command go on with the run of its job, as `--resume RUN` would, where there is one.

    Else its new run's folder will record the job. A line with a --resume of its own is left alone. argv: as it was typed.
    Raises SystemExit of code 0, with a line that says so, when the run is finished.
    """
    # a cross-validation is started anew: which of its runs are done is not known here
    trains = command.name in ("fit", "train") and command.folds is None and not command.asks_only
    job = job_of(environment) if trains else None
    if job is None:
        return
    first, run, note = is_first_process(environment), None, ""
    if command.resume is not None:
        run = run_of(find_resumable(logs_of(command), command.resume or None)) if job.again else None
    else:
        logs, line = logs_of(command), sha256("\0".join([command.name, *argv]).encode()).hexdigest()[:16]
        command.job = json.dumps({"job": job.key, "line": line, "recipe": command.recipe}) + "\n"
        run = run_of_job(logs, job, line, environment) if job.again or job.named else None
        if run is not None:
            note = f"going on with {display_path(run)}: {job.title} {'was started again' if job.again else 'has a run'}"
            _resume(command, run, job, line)
        elif job.again:
            note = f"{job.title} was started again, but has no checkpoint in {display_path(logs)} yet: starting anew"
    if run is not None and is_finished(run, needs_test=command.name == "train"):
        if first:
            results = display_path(run / "metrics.json")
            text.say(
                f"{display_path(run)} is finished: its results are in {results}, and {job.title} has nothing left to do"
            )
        raise SystemExit(0)
    if note and first:
        text.note(note)


def _resume(command: Command, run: Path, job: Job, line: str) -> None:
    """Turns a line into one that resumes a run; raises UsageError for another recipe than that of the job's first line."""
    record = json.loads((run / JOB).read_text())
    if record.get("recipe") != command.recipe:
        recipe = record.get("recipe") or "that fits this machine"
        raise UsageError(
            f"{display_path(run)} of {job.title} began with the recipe {recipe}: keep to it, or give {NAME} another value"
        )
    if record.get("line") == line:
        command.configs = []
    command.recipe, command.logs, command.resume = None, str(run.parent), str(run)


def logs_of(command: Command) -> Path:
    """The folder of runs that a new training of this line would use."""
    files = [*map(Path, reversed(command.configs)), *([recipe_path(command.recipe)] if command.recipe else [])]
    configs = (plain_values(file.expanduser()) or {} for file in files)
    return Path(
        command.logs or next((str(values["logs"]) for values in configs if values.get("logs")), LOGS)
    ).expanduser()
