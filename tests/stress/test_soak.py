"""Memory, open files, threads and disk stay constant over hundreds of short epochs; only curves grow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stress.fault_hooks import SAMPLES
from stress.forked import TINY, Forked, size

TRAINING = f"""{TINY} --data.count 60 --checkpoint-every 2 --trainer.log_every_n_steps 1
    --trainer.callbacks=stress.fault_hooks.Samples""".split()
GROWTH = 0.02  # fraction by which an allocator may grow between the two samples
LIMIT = 3600.0  # seconds


def soak(early: int, epochs: int, folder: str) -> list[dict[str, int]]:
    """Train and return the resources after `early` and after all `epochs`."""
    file = Path(folder) / "samples.txt"
    argv = [*TRAINING, "--epochs", str(epochs + 1)]  # a sample is taken at the start of the next epoch
    variables = {SAMPLES: f"{early},{epochs}:{file}"}
    Forked(argv, Path(folder) / "run", Path(folder) / "log.txt", more=variables).finish(LIMIT)
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.stress
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_a_long_training_uses_no_more_resources_than_a_short_one(
    forking: Callable[..., Any], write_counts: Callable[..., None], tmp_path: Path
) -> None:
    epochs = size("EPOCHS", 500)
    early, late = forking(soak, early=epochs // 10, epochs=epochs, folder=str(tmp_path))
    growth = {f"{name} after {epochs} epochs": late[name] / early[name] for name in ("memory", "open_files", "disk")}
    write_counts({"samples": [early, late], "headline": growth, "unit": dict.fromkeys(growth, "×")})
    assert late["curves"] > early["curves"]
    allowed = {"memory": early["memory"] * (1 + GROWTH), "disk": early["disk"] * (1 + GROWTH)}
    assert [name for name in early if name != "curves" and late[name] > allowed.get(name, early[name])] == []
