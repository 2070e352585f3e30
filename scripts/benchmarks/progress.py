"""Progress of measurements."""

from __future__ import annotations

import time

from cifar_lit.base.text import note
from cifar_lit.data.progress import SECONDS_BETWEEN_LINES


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

    def advance(self, done: float, detail: str = "") -> None:
        """Report the number of parts done, with the fraction of the current part. The estimate is linear."""
        now = time.monotonic()
        if now - self._printed >= SECONDS_BETWEEN_LINES and 0 < done < self.total:
            self._printed = now
            seconds = now - self._started
            part = f"{self._what} {int(done) + 1} of {self.total}" + (f", {detail}" if detail else "")
            note(f"{part} · {seconds:.0f} s of about {seconds * self.total / done:.0f} s")
