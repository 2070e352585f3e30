"""Hundreds of short epochs with logging and checkpoints: memory, open files, threads and disk must stay flat; curves grow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stress.fault_hooks import SAMPLES
from stress.forked import Forked, size

TRAINING = [
    *("train", "--recipe", "quickstart", "--accelerator", "cpu", "--precision", "32-true", "--net", "lenet"),
    *(
        "--data.count",
        "60",
        "--data.val_size",
        "20",
        "--data.image_size",
        "16",
        "--batch-size",
        "8",
        "--data.crop",
        "2",
    ),
    *("--model.ema_decay", "0.9", "--checkpoint-every", "2", "--trainer.log_every_n_steps", "1"),
    "--trainer.callbacks=stress.fault_hooks.Samples",
]
GROWTH = 0.02  # of memory, between the two samples: what an allocator may still do
LIMIT = 3600.0


def soak(early: int, epochs: int, folder: str) -> list[dict[str, int]]:
    """What a training holds after `early` and after all `epochs`."""
    file = Path(folder) / "samples.txt"
    argv = [*TRAINING, "--epochs", str(epochs + 1)]  # as a sample is taken before an epoch starts
    Forked(argv, Path(folder) / "run", Path(folder) / "log.txt", more={SAMPLES: f"{early},{epochs}:{file}"}).finish(
        LIMIT
    )
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.stress
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="it reads /proc, which this system does not have")
def test_a_long_training_holds_no_more_than_a_short_one(
    forking: Callable[..., Any], write_counts: Callable[..., None], tmp_path: Path
) -> None:
    epochs = size("EPOCHS", 500)
    early, late = forking(soak, early=epochs // 10, epochs=epochs, folder=str(tmp_path))
    growth = {f"{name} after {epochs} epochs": late[name] / early[name] for name in ("memory", "open_files", "disk")}
    write_counts({"samples": [early, late], "headline": growth, "unit": dict.fromkeys(growth, "×")})
    assert late["curves"] > early["curves"]
    allowed = {"memory": early["memory"] * (1 + GROWTH), "disk": early["disk"] * (1 + GROWTH)}
    assert [name for name in early if name != "curves" and late[name] > allowed.get(name, early[name])] == []
