"""Keeps library chatter off the console: tips, adverts, and warnings that a user can do nothing about."""

from __future__ import annotations

import logging
import os
import warnings


def catch_signals() -> None:
    """Makes Ctrl-C, SIGTERM and SLURM's signal to requeue raise `Interrupted` wherever the command is.

    A training stops after its step instead.
    """
    import signal

    from cifar_lit.cli.launched import by_slurm
    from cifar_lit.training.callbacks import Interrupted

    def stop(number: int, frame: object) -> None:
        raise Interrupted(number, requeue=number == requeue)

    requeue = signal.SIGUSR1 if by_slurm(os.environ) else None
    for number in filter(None, (signal.SIGINT, signal.SIGTERM, requeue)):
        signal.signal(number, stop)


def quieten() -> None:
    """To be called before anything else imports Lightning; our own output and real warnings are untouched."""
    os.environ.setdefault("POSSIBLE_USER_WARNINGS", "off")
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # what Lightning's command line calls
    # torch's own deprecation inside Lightning's batch handling
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
    # data.val_size 0 is meant
    warnings.filterwarnings("ignore", message=".*Total length of `list` across ranks is zero.*")
    # a resumed run goes on in its own folder
    warnings.filterwarnings("ignore", message=".*Checkpoint directory .* exists and is not empty.*")

    import lightning.pytorch  # noqa: F401 (sets its loggers' levels, which would undo ours)

    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
