"""Tests of features use the small runs of tests/training and their fixtures."""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1] / "training"))

from small_runs import dropout_net

__all__ = ["dropout_net"]
