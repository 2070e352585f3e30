"""`python -m cifar_lit` is the same as `cifar-lit`."""

from cifar_lit.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
