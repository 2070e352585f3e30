"""Make scripts/benchmarks importable, and run each test in an empty folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent.parent / "scripts" / "benchmarks"))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Change to an empty folder, and restore the settings of torch at the end."""
    monkeypatch.chdir(tmp_path)
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    yield tmp_path
    torch.set_float32_matmul_precision(precision)
    torch.set_num_threads(threads)
