"""Real commands, in processes of their own with a hard time limit, or in the process of the test."""

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from contract.command_line import FOREIGN_VARIABLES, Answer, metrics_of, rows_of, run_command
from safetensors.torch import load_file
from small_runs import same as same_bits
from torch import Tensor

from cifar_lit.base.files import PART
from cifar_lit.data.settings import Loading

ROOT = Path(__file__).parent.parent.parent
PYTHONPATH = f"{ROOT}:{ROOT}/tests:{Path(__file__).parent}"
CACHE = str(Loading().cache_path)  # shared: it lists the user's own runs
LIMIT = 300.0  # seconds until a command counts as frozen
SCRIPT = (str(ROOT / "scripts" / "train.py"),)

# 101 images in batches of 8: twelve full batches and one of 5, shared by two devices as 3 and 2. 39 steps in total.
STEPS_PER_EPOCH = 13
SETTINGS = [
    *shlex.split("--recipe tudui"),  # the default recipe differs between machines
    *shlex.split("--dataset shapes --data.count 121 --data.val_size 20 --data.image_size 16 --batch-size 8"),
    *shlex.split(
        "--data.augment.crop 2 --data.augment.flip random --data.mean 0.5 --data.std 0.25 --data.eval_batch_size 5"
    ),
    *shlex.split("--net lenet --lr 0.02 --model.optimizer_options.momentum 0.9 --model.schedule one_cycle --epochs 3"),
    *shlex.split("--weight_average.decay 0.9 --skip_easy.share 0.3"),
    *shlex.split("--precision 32-true --accelerator cpu --trainer.log_every_n_steps 4"),
    "--trainer.callbacks=at_step.AtStep",
]


# Copied once: other threads change the environment of this process while a command starts.
OWN_ENVIRONMENT = {name: value for name, value in os.environ.items() if not FOREIGN_VARIABLES.match(name)}


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a command, without variables of other runs."""
    return {**OWN_ENVIRONMENT, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH, "CIFAR_LIT_CACHE": CACHE, **more}


def run(words: Sequence[str], folder: Path, **more: str) -> Answer:
    """Run a command in `folder`, in another process."""
    streams: dict[str, Any] = {"capture_output": True, "text": True}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment(**more), timeout=LIMIT, **streams)
    return Answer(done.returncode, done.stdout, done.stderr)


def run_here(words: Sequence[str], folder: Path, **more: str) -> Answer:
    """Run a command of cifar-lit in this process, without TensorBoard images (half the time of a short run)."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(99)
    with contextlib.chdir(folder), patch("cifar_lit.train._draw"):
        return run_command(*words, default="fit", **environment(**more))


def only_run(folder: Path) -> Path:
    """Return the only run folder below `folder`."""
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
    """Assert bit-equal weights, results and curves of both runs, and no leftover files."""
    assert same_bits(final_weights(folder), final_weights(expected))
    assert curves(folder) == curves(expected)
    timings = dict.fromkeys(("train_seconds", "images_per_second", "test_seconds", "date", "command"))
    assert {**metrics(folder), **timings} == {**metrics(expected), **timings}
    assert not list(folder.rglob(f"*{PART}")) and not list(folder.rglob(".lock"))
