"""`python -m cifar_lit.sweep fit …` is `cifar-lit fit …` that stops, with a checkpoint, when its worker ends."""

import os
import signal
import threading
import time

PARENT = "CIFAR_LIT_SWEEP_WORKER"  # environment variable: the process id of the worker


def stop_with(parent: int) -> None:
    """Send SIGTERM to this process as soon as it has another parent."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    from cifar_lit.cli import main

    # Further ranks of this training are children of this process. They do not get the variable.
    worker = int(os.environ.pop(PARENT, os.getppid()))
    threading.Thread(target=stop_with, args=(worker,), daemon=True).start()
    raise SystemExit(main())
