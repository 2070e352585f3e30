"""Test a checkpoint: python scripts/test.py --ckpt_path lightning_logs/NAME/checkpoints/best.ckpt."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for a clone that is not installed

from cifar_lit.cli import main

if __name__ == "__main__":
    raise SystemExit(main(default="test"))
