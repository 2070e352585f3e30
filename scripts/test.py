"""Test a checkpoint: python scripts/test.py --ckpt_path lightning_logs/NAME/checkpoints/best.ckpt."""

from cifar_lit.cli import main

if __name__ == "__main__":
    raise SystemExit(main(default="test"))
