"""What a measurement says of its time while it runs, the same on a terminal and in a pipe, and how it is stopped."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from cifar_lit.cli.quiet import catch_signals
from cifar_lit.data.progress import SECONDS_BETWEEN_LINES
from cifar_lit.text import duration_text, note
from cifar_lit.training.orderly_stop import Interrupted, OrderlyStop


class Progress:
    """Says on stderr how long a measurement takes, and every ten seconds how far it is.

    total: how many parts there are. what: one of them, such as "round".
    """

    def __init__(self, total: int, what: str) -> None:
        self.total, self._what = total, what
        self._started, self._said = time.monotonic(), float("-inf")

    def announce(self, seconds: float, plan: str) -> None:
        """Says how long it takes where that is known before the first part."""
        self._started = self._said = time.monotonic()
        note(f"this takes about {duration_text(seconds)}: {plan}")

    def advance(self, done: float, detail: str = "") -> None:
        """So many parts are done, whole ones and a part of the next; what has taken their time tells how long all take."""
        now = time.monotonic()
        if now - self._said >= SECONDS_BETWEEN_LINES and 0 < done < self.total:
            self._said = now
            seconds = now - self._started
            part = f"{self._what} {int(done) + 1} of {self.total}" + (f", {detail}" if detail else "")
            note(f"{part} · {duration_text(seconds)} of about {duration_text(seconds * self.total / done)}")


class StepProgress(Callback):
    """Tells a measurement of whole trainings how far the current one is. before: trainings that are done."""

    def __init__(self, progress: Progress, before: int) -> None:
        self._progress, self._before = progress, before

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Learns how many steps there are."""
        self._steps = trainer.estimated_stepping_batches

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        """After each step; estimates of a schedule with growing images rise as it goes on."""
        part = min(0.999, trainer.global_step / self._steps)
        self._progress.advance(self._before + part, f"epoch {trainer.current_epoch + 1} of {trainer.max_epochs}")


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Within, Ctrl-C, SIGTERM and the terminal's end raise `Interrupted` wherever the program is, amid a training too.

    What is only measured needs no checkpoint. An interruption that was held back, so that what is measured by then is shown, is
    raised at the end.
    """
    catch_signals()
    Interrupted.latest = None
    signals, OrderlyStop.SIGNALS = OrderlyStop.SIGNALS, ()
    try:
        yield
    except Exception:
        if Interrupted.latest:  # compiled code raises errors of its own in its place
            raise Interrupted.latest from None
        raise
    finally:
        OrderlyStop.SIGNALS = signals
    if Interrupted.latest:
        raise Interrupted.latest
