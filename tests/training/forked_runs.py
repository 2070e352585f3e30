"""Trainings in several stages, each in forks of one process, so that all share its imports; and a SLURM that only takes notes."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from real_runs import only_run
from stress.forked import Forked

SLURM = {
    **{"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "night", "SLURM_CLUSTER_NAME": "hill", "SLURM_STEP_ID": "0"},
    **{"SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
}
QUEUED = "is being requeued and will resume automatically"


class Stage(NamedTuple):
    """A command in processes of its own.

    processes: how many, as torchrun would start them; or the variables of each. codes: their exit codes.
    reached: epoch and step of the run's last checkpoint by then, and the random states in it.
    """

    words: list[str]
    processes: int | list[dict[str, str]]
    environment: dict[str, str]
    codes: list[int]
    reached: tuple[int, int, int]


def run_stages(cases: dict[str, Sequence[Any]], folder: str) -> dict[str, list[list[int]]]:
    """Exit codes of every stage of each case; a stage leaves `<number>-<rank>.txt`, what was printed, and `<number>.ckpt`."""
    codes: dict[str, list[list[int]]] = {}
    for name, stages in cases.items():
        place, codes[name] = Path(folder, name), []
        for number, (words, processes, environment, *_) in enumerate(stages):
            codes[name].append(Forked(words, place, place / f"{number}-{{rank}}.txt", processes, environment).wait())
            shutil.copy(only_run(place) / "checkpoints" / "last.ckpt", place / f"{number}.ckpt")
    return codes


def scontrol(folder: Path, script: str = "exit 0") -> str:
    """A PATH with a `scontrol` of our own in front, which notes its words, and the checkpoint that there was by then."""
    folder.mkdir(parents=True, exist_ok=True)
    command = folder / "scontrol"
    command.write_text(f'#!/bin/sh\necho "$@" >> "{folder}/asked"\nls */*/checkpoints >> "{folder}/asked"\n{script}\n')
    command.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"
