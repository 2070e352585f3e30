"""Predict the classes of images with a run's net: python scripts/classify.py lightning_logs/NAME IMAGES."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for a clone that is not installed

from cifar_lit.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["classify", *sys.argv[1:]]))
