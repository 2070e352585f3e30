"""The measurements on a GPU: the loops beside ours follow the Trainer there, and clocks wait for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bench import SMALL

from cifar_lit.bench.commands import bench

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
ON_GPU = [*SMALL[:-1], "gpu"]


def figures(tmp_path: Path, *words: str) -> dict[str, Any]:
    file = tmp_path / "figures.json"
    bench([*words, "--json", str(file)])
    found: dict[str, Any] = json.loads(file.read_text())
    assert found["environment"]["gpu"]
    return found


@pytest.mark.parametrize("name", ["step", "tutorial"])
def test_loops_take_turns_on_the_gpu(tmp_path: Path, name: str) -> None:
    found = figures(tmp_path, name, "--recipe", "tudui", *ON_GPU, "--steps", "2", "--rounds", "3")
    assert found["rounds"] == 3


def test_batches_arrive_on_the_gpu(tmp_path: Path) -> None:
    found = figures(tmp_path, "input", *ON_GPU, "--batches", "2", "--rounds", "2")
    assert found["device"] == "cuda"


def test_a_gpu_has_a_column_beside_the_cpu(tmp_path: Path) -> None:
    words = ["--batch-sizes", "8", "--widths", "1", "--warmup", "1", "--steps", "2", "--rounds", "2"]
    cells = figures(tmp_path, "devices", *SMALL[:4], *words)["cells"]
    assert [cell["device"].split(",")[0] for cell in cells[:2]] == ["cpu", "gpu 0"]
    assert cells[1]["speed_up"] > 0
