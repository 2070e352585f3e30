from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)  # nets this small only wait for a second thread


@pytest.fixture(autouse=True)
def torch_settings() -> object:
    """What a measurement sets for its process is put back."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)
