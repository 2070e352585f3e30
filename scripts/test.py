"""Score a checkpoint on the test images: python scripts/test.py --ckpt_path RUN/checkpoints/best.ckpt."""

from cifar_lit.cli import main

if __name__ == "__main__":
    raise SystemExit(main(default="test"))
