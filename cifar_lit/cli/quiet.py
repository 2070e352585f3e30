"""Signal handlers, and a console without library noise: tips, adverts, and warnings that users cannot act on."""

from __future__ import annotations

import logging
import os
import signal
import threading
import warnings
from importlib import import_module

from cifar_lit.base.signals import HANGUP, REQUEUE, accept_hangup, stop_signals
from cifar_lit.cli.launch import by_slurm


def catch_signals() -> None:
    """Raise `Interrupted` on Ctrl-C, SIGTERM, SIGHUP and SLURM's requeue signal. A fit stops after its step."""
    from cifar_lit.training.orderly_stop import Interrupted

    def stop(number: int, frame: object) -> None:
        if number == HANGUP:
            accept_hangup()
        raise Interrupted(number, requeue=number == requeue)

    requeue = REQUEUE if by_slurm(os.environ) else None
    for number in filter(None, [*stop_signals(), requeue]):
        signal.signal(number, stop)


def quieten() -> None:
    """Silence known noise of torch and Lightning. Call this before anything else imports Lightning."""
    os.environ.setdefault("POSSIBLE_USER_WARNINGS", "off")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # warnings of failed name lookups
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # raised by LightningCLI
    for message in (
        ".*LeafSpec.*",  # torch's deprecation inside Lightning
        ".*Total length of `list` across ranks is zero.*",  # data.val_size 0
        ".*but have no logger configured.*",  # `validate` prints its score
        ".*Checkpoint directory .* exists and is not empty.*",  # a resumed run
        "Detected call of `lr_scheduler.step",  # 16-mixed skips a first step whose gradients overflow
        "Grad strides do not match bucket view strides",  # 1×1 filters: both memory formats are equal
    ):
        warnings.filterwarnings("ignore", message=message)

    def hook(args: threading.ExceptHookArgs) -> None:
        if type(args.thread).__name__ != "_AsyncWriterThread":  # TensorBoard raises this error again at its next write
            threading.__excepthook__(args)

    threading.excepthook = hook

    import_module("lightning.pytorch")  # sets the levels of its loggers
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)  # a profiler's table is logged
