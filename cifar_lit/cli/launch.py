"""Apply the settings that torchrun, SLURM or a restarted job imply to a training command."""

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
from cifar_lit.runs.config_file import check_choices, plain_values
from cifar_lit.runs.run_folder import JOB, display_path, find_resumable, is_finished, run_of

# torchrun's names of a rank's variables, and SLURM's
RANK_VARIABLES = {
    "RANK": "SLURM_PROCID",
    "LOCAL_RANK": "SLURM_LOCALID",
    "NODE_RANK": "SLURM_NODEID",
    "WORLD_SIZE": "SLURM_NTASKS",
}


def apply_launcher(command: Command, environment: MutableMapping[str, str]) -> None:
    """Set devices and nodes to those that torchrun or SLURM started; raise UsageError if the flags contradict them.

    One SLURM task is one device. SLURM's ranks are also set under torchrun's names. Lightning compares its settings
    with the job's variables, so these are set to the values of this job step, which may have fewer tasks.
    """
    if by_torchrun(environment):
        per_node, world = int(environment["LOCAL_WORLD_SIZE"]), int(environment["WORLD_SIZE"])
        _set_devices(command, "torchrun", per_node, "--nproc-per-node", world // per_node, "--nnodes")
        return
    if not by_slurm(environment) or command.asks_only:
        return
    tasks = int(environment["SLURM_NTASKS"])
    if tasks > 1 and "SLURM_STEP_ID" not in environment:
        raise UsageError(f"this SLURM job has {tasks} tasks, but only one of them runs: put srun before the command")
    counts = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE") or str(tasks)
    node_counts = {int(count) for count in re.sub(r"\(x\d+\)", "", counts).split(",")}
    if len(node_counts) > 1:
        raise UsageError(
            f"SLURM started {counts} tasks on the nodes: use --ntasks-per-node for the same number on each"
        )
    per_node = min(node_counts.pop(), tasks)
    _set_devices(command, "SLURM", per_node, "--ntasks-per-node", tasks // per_node, "--nodes")
    environment["SLURM_NTASKS_PER_NODE"] = str(per_node)
    environment["SLURM_NNODES"] = str(tasks // per_node)
    environment.update({name: environment[slurm_name] for name, slurm_name in RANK_VARIABLES.items()})


def _set_devices(
    command: Command, launcher: str, devices: int, devices_option: str, nodes: int, nodes_option: str
) -> None:
    settings = (("devices", devices, devices_option), ("nodes", nodes, nodes_option))
    for flag, number, option in settings:
        value = command.value(SHORT[flag])
        if value not in (None, "auto", "-1", str(number)):
            reason = f"contradicts {launcher}, which started {number} ({option})"
            raise UsageError(f"--{flag} {value} {reason}: leave --{flag} out or make them agree")
        command.flags.append(f"--{SHORT[flag]}={number}")


def continue_job(command: Command, argv: list[str], environment: Mapping[str, str]) -> None:
    """Resume the run of a restarted job, as `--resume RUN` would. The folder of a new run records its job.

    A command with --resume is not changed. If the run is finished, print this and exit with code 0.
    """
    if command.name not in ("fit", "train") or command.several or command.asks_only:
        return
    job = job_of(environment)
    if job is None:
        return
    is_first, run, note = is_first_process(environment), None, ""
    logs = logs_of(command)
    if command.resume is not None:
        if job.again:
            run = run_of(find_resumable(logs, command.resume or None))
    else:
        line = sha256("\0".join([command.name, *argv]).encode()).hexdigest()[:16]
        command.job = json.dumps({"job": job.key, "line": line, "recipe": command.recipe}) + "\n"
        if job.again or job.named:
            run = run_of_job(logs, job, line, environment)
        if run is not None:
            reason = "has a run"
            if job.again:
                reason = "was restarted"
            note = f"resuming {display_path(run)}: {job.title} {reason}"
            _resume(command, run, job, line)
        elif job.again:
            note = f"{job.title} was restarted, but has no checkpoint in {display_path(logs)} yet: starting a new run"
    if run is not None and is_finished(run, needs_test=command.name == "train"):
        if is_first:
            results = f"its results are in {display_path(run / 'metrics.json')}"
            text.say(f"{display_path(run)} is finished: {results}. {job.title} has nothing left to do.")
        raise SystemExit(0)
    if note and is_first:
        text.note(note)


def _resume(command: Command, run: Path, job: Job, line: str) -> None:
    """Make a command resume a run; raise UsageError if the job began with another recipe."""
    record = json.loads((run / JOB).read_text())
    if record.get("recipe") != command.recipe:
        recipe = record.get("recipe") or "for this machine"
        started = f"{display_path(run)} of {job.title} began with the recipe {recipe}"
        raise UsageError(f"{started}: use this recipe, or give {NAME} another value")
    if record.get("line") == line:
        command.configs = []
    command.recipe, command.logs, command.resume = None, str(run.parent), str(run)


def logs_of(command: Command) -> Path:
    """Return the folder for run folders that a new training would use."""
    if command.logs is not None:
        return Path(command.logs).expanduser()
    files = [Path(config) for config in reversed(command.configs)]
    if command.recipe:
        files.append(recipe_path(command.recipe))
    for file in files:
        logs = (plain_values(file.expanduser()) or {}).get("logs")
        if isinstance(logs, str) and logs:
            from cifar_lit.cli import trust  # imports torch

            trust.allow_run(file.expanduser(), command.trust)
            check_choices({"logs": logs})
            return Path(logs).expanduser()
    return Path(LOGS).expanduser()
