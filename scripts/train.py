"""Train a recipe and test the best checkpoint once: python scripts/train.py --recipe quickstart --devices 2."""

from cifar_lit.cli import main

if __name__ == "__main__":
    raise SystemExit(main(default="train"))
