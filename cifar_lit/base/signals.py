"""The signals that ask the program to stop: Ctrl-C, SIGTERM, and SIGHUP of a closed terminal or a lost ssh session.

Windows has Ctrl-Break (SIGBREAK) instead of SIGTERM and SIGHUP.
"""

from __future__ import annotations

import os
import signal
import stat
from contextlib import suppress

HANGUP: int | None = getattr(signal, "SIGHUP", None)  # not on Windows
BREAK: int | None = getattr(signal, "SIGBREAK", None)  # only on Windows
REQUEUE: int | None = getattr(signal, "SIGUSR1", None)  # from SLURM; not on Windows
STOP_SIGNALS: tuple[int, ...] = tuple(filter(None, (signal.SIGINT, signal.SIGTERM, HANGUP, BREAK)))


def stop_signals() -> list[int]:
    """Return the signals to handle: STOP_SIGNALS, without a SIGHUP that is ignored, as nohup sets it."""
    numbers = list(STOP_SIGNALS)
    if HANGUP and signal.getsignal(HANGUP) is signal.SIG_IGN:
        numbers.remove(HANGUP)
    return numbers


def ignore_stop_signals() -> None:
    """Ignore STOP_SIGNALS in a worker process. The main process handles them and ends its workers."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def accept_hangup() -> None:
    """Ignore further SIGHUPs, and discard output to a closed terminal, which would raise an OSError.

    Call it from the signal handler. A lost ssh session sends SIGHUP twice, from the shell and from the kernel.
    """
    if HANGUP:
        signal.signal(HANGUP, signal.SIG_IGN)
    for descriptor in (1, 2):
        with suppress(OSError):  # a closed descriptor
            if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                devnull = os.open(os.devnull, os.O_WRONLY)
                os.dup2(devnull, descriptor)
                os.close(devnull)
