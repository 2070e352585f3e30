"""The file of `train --seeds --json FILE`: accuracy, time and memory of each training, by recipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cifar_lit.bench.process import without_places
from cifar_lit.bench.report import figures_of, write_figures
from cifar_lit.cli.fit import TrainingCLI
from cifar_lit.cli.flags import Command, recipe_path
from cifar_lit.files import write_text
from cifar_lit.runs.run_folder import is_finished, read_json, read_metrics
from cifar_lit.stats import SHARE, mean_interval

MEASURED = "measured.json"  # memory by run folder
FIGURES = ("seed", "dataset", "accelerator", "precision", "parameters", "images_per_second", "test_seconds")
SCORES = ("accuracy", "loss", "balanced_accuracy", "macro_f1")
# A training that was killed before it was measured has neither memory nor a time that counts.
UNMEASURED = {"memory_mb": None, "device_memory_mb": None, "first": True}


def peak_memory() -> dict[str, int | None]:
    """Return the peak memory in MB: of this process, and of the GPU since the last call (None if there was none)."""
    if sys.platform == "win32":
        import psutil

        most = int(psutil.Process().memory_info().peak_wset)
    else:
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if sys.platform != "darwin":
            most *= 1024  # bytes
    on_device = 0
    if torch.cuda.is_initialized():
        on_device = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    return {"memory_mb": round(most / 1e6), "device_memory_mb": round(on_device / 1e6) or None}


class Record:
    """The --json file, written after each training, and the memory of each training, kept in the folder of them all.

    others: entries of other recipes in the file, by name. That of this recipe is added.
    """

    def __init__(self, command: Command, folder: Path, others: dict[str, Any]) -> None:
        self._command, self._folder, self._entries = command, folder, others
        self._name = "custom"
        if command.recipe:
            self._name = recipe_path(command.recipe).stem
        self._measured = read_json(folder / MEASURED)
        self._trained = 0

    def add(self, cli: TrainingCLI) -> None:
        """Measure a training that has ended in this process. Its time may count less, see `first`."""
        if cli.model.predictions is None:  # no test
            return
        # The first training of a process loads code and compiles, and a resumed one has been interrupted.
        first = self._trained == 0 or cli.checkpoint is not None
        self._trained += 1
        self._measured[cli.run.folder.path.name] = {**peak_memory(), "first": first}
        write_text(self._folder / MEASURED, json.dumps(self._measured) + "\n")
        runs = (self._folder / name for name in self._measured)
        self.write([run for run in runs if is_finished(run, needs_test=True)])

    def write(self, runs: Sequence[Path]) -> None:
        """Write the file with these runs."""
        if not self._command.json:
            return
        entries = []
        for run in runs:
            metrics = read_metrics(run)
            test = metrics["test"]
            entry = {name: metrics[name] for name in FIGURES} | {name: test[name] for name in SCORES}
            entry |= {"views": test.get("tta"), "seconds": metrics["train_seconds"]}
            entries.append(entry | self._measured.get(run.name, UNMEASURED))
        accuracy = mean_interval([entry["accuracy"] for entry in entries], SHARE)
        self._entries[self._name] = {"accuracy": accuracy, "runs": entries}
        flags = without_places(self._command.flags)
        write_figures(Path(self._command.json), figures_of("recipe", {"flags": flags}, recipes=self._entries))
