"""Record scores and times of the trainings of `train --seeds`: seeds.py lightning_logs/cpu91-seeds-1 FILE.json."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from report import environment, write_figures

from cifar_lit.base.files import read_json
from cifar_lit.base.stats import SHARE, mean_interval
from cifar_lit.run.record import read_metrics

# Flags with paths, which are not recorded.
PLACES = re.compile(r"--(data-dir|logs|data\.root|data\.(loading\.)?cache_dir)=")
FIGURES = ("seed", "dataset", "accelerator", "precision", "parameters", "images_per_second", "test_seconds")
SCORES = ("accuracy", "loss", "balanced_accuracy", "macro_f1")


def run(folder: Path, file: Path) -> None:
    """Write the results of the finished trainings in a folder of `train --seeds` to a JSON file."""
    group = read_json(folder / "seeds.json")
    entries = []
    first = min((folder / Path(name).name for name in group["runs"]), key=_finished)
    for name in group["runs"]:
        path = folder / Path(name).name
        metrics = read_metrics(path)
        test = metrics["test"]
        entry = {key: metrics[key] for key in FIGURES} | {key: test[key] for key in SCORES}
        entry |= {"views": test.get("tta"), "seconds": metrics["train_seconds"], "calibration": test["calibration"]}
        entry["first"] = path == first  # the first training of a process loads code
        entries.append(entry)
    content = {
        "bench": "recipe",
        "settings": {"flags": [word for word in group["command"] if not PLACES.match(word)]},
        "environment": environment(),
        "recipes": {
            metrics["recipe"]: {
                "accuracy": mean_interval([each["accuracy"] for each in entries], SHARE),
                "runs": entries,
            }
        },
    }
    write_figures(file, content)


def _finished(folder: Path) -> float:
    return (folder / "metrics.json").stat().st_mtime


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]))
