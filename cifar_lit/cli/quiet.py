"""Keeps library chatter off the console: tips, adverts, and warnings that a user can do nothing about."""

from __future__ import annotations

import logging
import os
import signal
import threading
import warnings

from cifar_lit.distributed.rank_info import by_slurm
from cifar_lit.signals import HANGUP, accept_hangup, stop_signals


def hold_signals() -> None:
    """Keeps SLURM's signal to requeue, which would kill a process without a handler, until `catch_signals`.

    To be called before libraries are imported, which takes seconds; the signal can come at once where --time is short.
    """
    if by_slurm(os.environ):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})


def catch_signals() -> None:
    """Let Ctrl-C, SIGTERM, SIGHUP and SLURM's requeue signal raise `Interrupted`. A training stops after its step instead."""
    from cifar_lit.training.orderly_stop import Interrupted

    def stop(number: int, frame: object) -> None:
        if number == HANGUP:
            accept_hangup()
        raise Interrupted(number, requeue=number == requeue)

    requeue = signal.SIGUSR1 if by_slurm(os.environ) else None
    for number in filter(None, (*stop_signals(), requeue)):
        signal.signal(number, stop)
    if requeue:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {requeue})


def quieten() -> None:
    """Silence known noise of torch and Lightning. Call this before anything else imports Lightning."""
    os.environ.setdefault("POSSIBLE_USER_WARNINGS", "off")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # warnings of how torch looks up the names of other machines
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # what Lightning's command line calls
    for message in (
        ".*LeafSpec.*",  # torch's own deprecation inside Lightning's batch handling
        ".*Total length of `list` across ranks is zero.*",  # data.val_size 0 is meant
        ".*but have no logger configured.*",  # `validate` prints its score
        ".*Checkpoint directory .* exists and is not empty.*",  # a resumed run goes on in its own folder
        "Grad strides do not match bucket view strides",  # of 1×1 filters, whose two memory orders are one
    ):
        warnings.filterwarnings("ignore", message=message)

    def hook(args: threading.ExceptHookArgs) -> None:
        if type(args.thread).__name__ != "_AsyncWriterThread":  # TensorBoard's, whose failure its next write raises
            threading.__excepthook__(args)

    threading.excepthook = hook

    import lightning.pytorch

    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)  # a profiler's table is logged
