"""Tests of features use the small runs of tests/training and their fixtures."""

import sys
from pathlib import Path

import torch

sys.path.insert(1, str(Path(__file__).parents[1] / "training"))

from small_runs import dropout_net

__all__ = ["dropout_net"]

torch.set_num_threads(1)  # nets this small only wait for a second thread
