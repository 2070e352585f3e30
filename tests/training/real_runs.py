"""The real commands: in processes of their own under a hard time limit, or in the test's process where that will do."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from contract.command_line import FOREIGN_VARIABLES, Answer, metrics_of, rows_of, run_command
from safetensors.torch import load_file
from small_runs import same as same_bits
from torch import Tensor

from cifar_lit.data.cache import default_cache_dir
from cifar_lit.files import PART

ROOT = Path(__file__).parent.parent.parent
PYTHONPATH = f"{ROOT}:{ROOT}/tests:{Path(__file__).parent}"
CACHE = str(default_cache_dir().expanduser())  # one for all, as it has which runs are the user's own
LIMIT = (
    300.0  # seconds that a command may take before it counts as frozen; a busy machine takes a minute for two processes
)
SCRIPT = (str(ROOT / "scripts" / "train.py"),)

# 101 images in batches of 8: twelve full ones and one of 5, which two devices share as 3 and 2; 39 steps in all.
STEPS_PER_EPOCH = 13
SETTINGS = [
    *("--recipe", "tudui"),  # not the machine's default, which differs
    *(
        "--dataset",
        "shapes",
        "--data.count",
        "121",
        "--data.val_size",
        "20",
        "--data.image_size",
        "16",
        "--batch-size",
        "8",
    ),
    *(
        "--data.crop",
        "2",
        "--data.flip",
        "random",
        "--data.mean",
        "0.5",
        "--data.std",
        "0.25",
        "--data.eval_batch_size",
        "5",
    ),
    *("--net", "lenet", "--lr", "0.02", "--model.momentum", "0.9", "--model.schedule", "one_cycle", "--epochs", "3"),
    *("--model.ema_decay", "0.9", "--data.skip_easy", "0.3"),
    *("--precision", "32-true", "--accelerator", "cpu", "--trainer.log_every_n_steps", "4"),
    "--trainer.callbacks=at_step.AtStep",
]


# Taken once: commands start in threads while others run, and change it, in this process.
OWN_ENVIRONMENT = {name: value for name, value in os.environ.items() if not FOREIGN_VARIABLES.match(name)}


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a command, with nothing left in it of another run."""
    return {**OWN_ENVIRONMENT, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH, "CIFAR_LIT_CACHE": CACHE, **more}


def run(words: Sequence[str], folder: Path, **more: str) -> Answer:
    """Runs a command to its end in `folder` and in a process group of its own; what is left of the group then is killed."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}-{time.monotonic_ns()}.txt" for name in ("out", "err")]
    with files[0].open("w") as out, files[1].open("w") as err:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            env=environment(**more),
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    try:
        code = process.wait(LIMIT)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return Answer(code, *(file.read_text() for file in files))


def here(words: Sequence[str], folder: Path, **more: str) -> Answer:
    """Run a command of cifar-lit in this process, without TensorBoard's pictures, which take half of a short training's time."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(99)
    with contextlib.chdir(folder), patch("cifar_lit.train.draw_for_tensorboard"):
        return run_command(*words, default="fit", **environment(**more))


def only_run(folder: Path) -> Path:
    """The run folder that a command in `folder` made, which must be one."""
    (run_folder,) = (folder / "lightning_logs").iterdir()
    return run_folder


def final_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tested weights of the only run."""
    return load_file(only_run(folder) / "model.safetensors")


def metrics(folder: Path) -> dict[str, Any]:
    """Return the results of the only run."""
    return metrics_of(only_run(folder))


def curves(folder: Path) -> list[dict[str, str]]:
    """Return the rows of the only run's metrics.csv."""
    return rows_of(only_run(folder) / "metrics.csv")


def assert_same_run(folder: Path, expected: Path) -> None:
    """Both runs ended with the same weights, results and curves, to the last digit, and left nothing lying about."""
    assert same_bits(final_weights(folder), final_weights(expected))
    assert curves(folder) == curves(expected)
    timed = {"train_seconds", "images_per_second"}
    results = [
        {name: value for name, value in metrics(each).items() if name not in timed} for each in (folder, expected)
    ]
    assert results[0] == results[1]
    assert not list(folder.rglob(f"*{PART}")) and not list(folder.rglob(".lock"))
