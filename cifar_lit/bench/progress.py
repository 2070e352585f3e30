"""Progress and interruption of measurements."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from cifar_lit.cli.quiet import catch_signals
from cifar_lit.data.progress import SECONDS_BETWEEN_LINES
from cifar_lit.text import duration_text, note
from cifar_lit.training.orderly_stop import Interrupted, OrderlyStop


class Progress:
    """Print the progress and the estimated time of a measurement to stderr, every ten seconds.

    Args:
        total: number of parts.
        what: name of a part, such as "round".
    """

    def __init__(self, total: int, what: str) -> None:
        self.total, self._what = total, what
        self._started = time.monotonic()
        self._printed = float("-inf")

    def announce(self, seconds: float, plan: str) -> None:
        """Print the duration if it is known before the first part."""
        self._started = self._printed = time.monotonic()
        note(f"this takes about {duration_text(seconds)}: {plan}")

    def advance(self, done: float, detail: str = "") -> None:
        """Report the number of parts done, with the fraction of the current part. The estimate is linear."""
        now = time.monotonic()
        if now - self._printed >= SECONDS_BETWEEN_LINES and 0 < done < self.total:
            self._printed = now
            seconds = now - self._started
            part = f"{self._what} {int(done) + 1} of {self.total}" + (f", {detail}" if detail else "")
            note(f"{part} · {duration_text(seconds)} of about {duration_text(seconds * self.total / done)}")


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP raise `Interrupted` at once, also in a training, which needs no checkpoint here.

    An interruption that the measurement has caught to print its results is raised at the end.
    """
    catch_signals()
    Interrupted.latest = None
    signals, OrderlyStop.SIGNALS = OrderlyStop.SIGNALS, ()
    try:
        yield
    except Exception:
        if Interrupted.latest:  # compiled code may replace the exception by another error
            raise Interrupted.latest from None
        raise
    finally:
        OrderlyStop.SIGNALS = signals
    if Interrupted.latest:
        raise Interrupted.latest
