"""`python -m cifar_lit` is the same as `cifar-lit`."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        folder = sys.path.pop(0)  # Python puts the working folder first, where a stranger's `torch.py` would take torch's place
        if __file__.startswith(f"{folder}/cifar_lit"):
            sys.path.append(folder)  # this package itself is there: it must be found by processes that this one starts
    from cifar_lit.cli import main

    raise SystemExit(main())
