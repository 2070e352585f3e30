"""Train a recipe and test the best checkpoint once: python scripts/train.py --recipe quickstart --devices 2."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for a clone that is not installed

from cifar_lit.cli import main

if __name__ == "__main__":
    raise SystemExit(main(default="train"))
