"""Trainings whose processes are forks of one, so that all share its imports; a program, as pytest must not be forked itself.

It is given, as JSON, {name: {folder, stages}} with stages of {words, processes, environment}, which follow each other there.
It prints {name: [[exit code of each process] of each stage]}. A stage leaves `<number>.txt`, what its processes said, and
`<number>.ckpt`, the run's last checkpoint by then.
"""

import json
import shutil
import sys
from pathlib import Path

from real_runs import LIMIT, only_run
from stress.forked import Forked, warm

if __name__ == "__main__":
    warm()
    codes: dict[str, list[list[int]]] = {}
    for name, case in json.loads(sys.argv[1]).items():
        folder = Path(case["folder"])
        codes[name] = []
        for number, stage in enumerate(case["stages"]):
            training = Forked(stage["words"], folder, folder / f"{number}.txt", stage["processes"], stage["environment"])
            codes[name].append(training.wait(LIMIT))
            shutil.copy(only_run(folder) / "checkpoints" / "last.ckpt", folder / f"{number}.ckpt")
    print(json.dumps(codes))
