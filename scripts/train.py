"""Train on a recipe, then test the best weights once: python scripts/train.py --recipe quickstart --devices 2."""

from cifar_lit.cli import main

if __name__ == "__main__":
    raise SystemExit(main(default="train"))
