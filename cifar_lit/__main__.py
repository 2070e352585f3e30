"""`python -m cifar_lit` is the same as `cifar-lit`."""

import os
import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # Python puts the working folder first. An unknown `torch.py` there would replace torch.
        folder = sys.path.pop(0)
        if __file__.startswith(f"{folder}{os.sep}cifar_lit"):  # a checkout, which child processes must find too
            sys.path.append(folder)
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), folder]))
    from cifar_lit.cli import main

    raise SystemExit(main())
