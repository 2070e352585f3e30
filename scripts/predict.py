"""Name what is on pictures with a run's net: python scripts/predict.py lightning_logs/NAME PICTURES."""

import sys

from cifar_lit.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["classify", *sys.argv[1:]]))
