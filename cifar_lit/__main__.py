"""`python -m cifar_lit` is the same as `cifar-lit`."""

import os
import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        folder = sys.path.pop(
            0
        )  # Python puts the working folder first, where a stranger's `torch.py` would take torch's place
        if __file__.startswith(
            f"{folder}{os.sep}cifar_lit"
        ):  # a checkout, which processes that this one starts must find too
            sys.path.append(folder)
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), folder]))
    from cifar_lit.cli import main

    raise SystemExit(main())
