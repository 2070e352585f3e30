"""Trainings whose processes are forks of one, so that all share its imports; a program, as pytest must not be forked itself.

It is given, as JSON, {name: {folder, stages}} with stages of {words, processes, environment}, which follow each other there.
It prints {name: [[exit code of each process] of each stage]}. A stage leaves `<number>.txt`, what its processes said, and
`<number>.ckpt`, the run's last checkpoint by then.
"""

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from real_runs import environment, free_port, only_run

import cifar_lit.cli.fit
from cifar_lit.cli.main import main as dispatch


def forked(words: Sequence[str], folder: Path, output: Path, processes: int, more: Mapping[str, str]) -> list[int]:
    """Exit codes of a command's processes, started as torchrun does where there are several."""
    shared = {"TORCHELASTIC_RUN_ID": "forks", "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    children = []
    for rank in range(processes):
        if child := os.fork():
            children.append(child)
            continue
        code = 70
        try:
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
            os.environ.clear()
            os.environ.update(environment(**own, **more))
            os.chdir(folder)
            sys.argv = ["cifar-lit"]
            code = dispatch(list(words), "fit")
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main(text: str) -> None:
    """Runs the stages of every case."""
    assert cifar_lit.cli.fit
    codes: dict[str, list[list[int]]] = {}
    for name, case in json.loads(text).items():
        folder = Path(case["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        codes[name] = []
        for number, stage in enumerate(case["stages"]):
            output = folder / f"{number}.txt"
            codes[name].append(forked(stage["words"], folder, output, stage["processes"], stage["environment"]))
            shutil.copy(only_run(folder) / "checkpoints" / "last.ckpt", folder / f"{number}.ckpt")
    print(json.dumps(codes))


if __name__ == "__main__":
    main(sys.argv[1])
