"""One training in this process, for measurements that compare trainings."""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from cifar_lit.bench.progress import Progress
from cifar_lit.bench.record import figures_of_run
from cifar_lit.cli.fit import TrainingCLI
from cifar_lit.cli.flags import parse
from cifar_lit.errors import Failure
from cifar_lit.runs.run_folder import read_metrics


class StepProgress(Callback):
    """Report the progress of the current training. before: number of finished trainings."""

    def __init__(self, progress: Progress, before: int) -> None:
        self._progress, self._before = progress, before

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Estimate the number of steps."""
        self._steps = trainer.estimated_stepping_batches

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        """Report each step. If the image size grows during the training, the estimated time grows too."""
        part = min(0.999, trainer.global_step / self._steps)
        self._progress.advance(self._before + part, f"epoch {trainer.current_epoch + 1} of {trainer.max_epochs}")


def run_once(recipe: str, flags: Sequence[str], seed: int, logs: str | None, *callbacks: Callback) -> dict[str, Any]:
    """Train and test a recipe with one seed in this process, without its output; raise Failure if there was no test.

    Args:
        flags: further flags of `train`.
        logs: folder for run folders, None for a temporary one.
        callbacks: added to the callbacks of the run.
    """
    with nullcontext(logs) if logs else tempfile.TemporaryDirectory(prefix="cifar-lit-bench-") as name:
        folder = Path(name).expanduser()
        before = set(folder.glob("*"))
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
            argv = ["--recipe", recipe, *flags, "--seed", str(seed), "--logs", str(folder)]
            TrainingCLI(parse("train", argv), *callbacks)
        new_runs = map(read_metrics, set(folder.glob("*")) - before)
        trained = (run for run in new_runs if run.get("seed") == seed and run.get("test") and run.get("train_seconds"))
        metrics = next(trained, None)
    if metrics is None:
        raise Failure(f"{recipe} with seed {seed} ended without a test: leave out flags that shorten a run")
    gc.collect()  # net and Trainer refer to each other and would keep device memory
    return {"date": time.strftime("%Y-%m-%d"), **figures_of_run(metrics)}
