"""`python -m cifar_lit.sweep fit …` is `cifar-lit fit …` that stops, with a checkpoint, when its worker ends."""

import os
import signal
import threading

from cifar_lit.cli import main


def stop_with_worker() -> None:
    """Stop when standard input ends: a pipe of the worker, which never writes to it."""
    os.read(0, 1)
    signal.raise_signal(signal.SIGTERM)  # not os.kill, which would end the process at once on Windows


if __name__ == "__main__":
    threading.Thread(target=stop_with_worker, daemon=True).start()
    raise SystemExit(main())
