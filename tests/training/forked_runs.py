"""Runs in several stages, in forks of one process that share its imports, and a fake SLURM that records requests."""

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


class Stage(NamedTuple):
    """One command in processes of its own.

    Args:
        processes: their number, as torchrun would start them, or the environment of each.
        codes: the expected exit codes.
        reached: epoch, step and number of random states of the run's last checkpoint after this stage.
    """

    words: list[str]
    processes: int | list[dict[str, str]]
    environment: dict[str, str]
    codes: list[int]
    reached: tuple[int, int, int]


def run_stages(cases: dict[str, Sequence[Any]], folder: str) -> dict[str, list[list[int]]]:
    """Return the exit codes of every stage of each case.

    Each stage leaves its output in `<number>-<rank>.txt` and its last checkpoint in `<number>.ckpt`.
    """
    codes: dict[str, list[list[int]]] = {name: [] for name in cases}
    for name, stages in cases.items():
        place = Path(folder, name)
        for number, (words, processes, environment, *_) in enumerate(stages):
            codes[name].append(Forked(words, place, place / f"{number}-{{rank}}.txt", processes, environment).wait())
            shutil.copy(only_run(place) / "checkpoints" / "last.ckpt", place / f"{number}.ckpt")
    return codes


def scontrol(folder: Path, script: str = "exit 0") -> str:
    """Return a PATH with a fake `scontrol` that records its arguments and the checkpoints present at the call."""
    folder.mkdir(parents=True, exist_ok=True)
    command = folder / "scontrol"
    requests = f'>> "{folder}/requests"'
    command.write_text(f'#!/bin/sh\necho "$@" {requests}\nls */*/checkpoints {requests}\n{script}\n')
    command.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"
