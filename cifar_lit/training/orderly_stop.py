"""Stop a training after the current step on a signal, with a checkpoint of that step."""

from __future__ import annotations

import signal
from types import FrameType
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import Callback, Checkpoint

from cifar_lit.base.signals import HANGUP, REQUEUE, accept_hangup, stop_signals
from cifar_lit.base.text import note
from cifar_lit.training.checkpoint import LastCheckpoint
from cifar_lit.training.loop import validates_next, within_epoch

if TYPE_CHECKING:
    from cifar_lit.data.image_set import Batch
    from cifar_lit.training.classifier import ImageClassifier


class Interrupted(BaseException):
    """The user or the system stopped the run (Ctrl-C, SIGTERM, SIGHUP, SLURM's requeue signal)."""

    latest: Interrupted | None = None  # latest exception, because matplotlib's compiled code replaces it by another

    def __init__(self, number: int, requeue: bool = False) -> None:
        super().__init__(signal.Signals(number).name)
        Interrupted.latest = self
        self.exit_code = 128 + number
        self.requeue = requeue  # whether SLURM should start the job again
        self.resume: str | None = None  # the command to resume, once known


class NoSignalHandlers(Callback):
    """Keep the Trainer from registering its signal handlers.

    Its handlers write SLURM's checkpoint within a step, which is not resumed exactly, and communicate with other
    processes, which can deadlock. `OrderlyStop` handles signals during a training. The Trainer's broadcast of SIGTERM
    before each step, which synchronises the device, is then unnecessary.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Replace the Trainer's methods."""
        trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        # With max_steps, Lightning would resume the end of an epoch as if it were its middle, and count it twice.
        trainer.fit_loop._iteration_based_training = lambda: False  # type: ignore[method-assign]


class Agreement:
    """The maximum of an integer over all ranks, exchanged between the CPUs while the devices compute.

    The exchange uses its own process group (gloo). A collective call on the training device would queue behind
    the step, and reading its result would wait for the step. All methods are collective: every rank must call them.
    """

    def __init__(self) -> None:
        self._group: Any = None  # None for a single rank
        self._number = torch.zeros((), dtype=torch.int64)
        self._work: torch.distributed.Work | None = None

    def connect(self, trainer: pl.Trainer) -> None:
        """Connect the ranks. Call this in `setup`, before the clock starts."""
        if trainer.world_size > 1 and self._group is None:
            # timeout=None selects torch's default timeout.
            timeout = getattr(trainer.strategy, "_timeout", None)
            self._group = torch.distributed.new_group(backend="gloo", timeout=timeout)

    def start(self, number: int) -> None:
        """Send this rank's number, without waiting for the others."""
        self._number = torch.tensor(number)
        if self._group is not None:
            highest = torch.distributed.ReduceOp.MAX
            self._work = torch.distributed.all_reduce(self._number, highest, group=self._group, async_op=True)

    def result(self) -> int:
        """Return the highest number sent. Wait until every rank has sent its number."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return int(self._number)


class OrderlyStop(Checkpoint):
    """Write `last.ckpt` and stop after the current step on Ctrl-C, SIGTERM, SIGHUP or SLURM's requeue signal.

    If a validation follows the step, it runs first. A signal during validation stops after the epoch, which writes a
    checkpoint. A second signal stops immediately, unless either is SIGHUP, because a lost session sends several
    signals. This class is a `Checkpoint` so that the Trainer calls it after callbacks that change the saved state.

    All devices stop at the same step. They exchange their signals at the start of each step and read the result at its
    end. With several devices, a signal during a step stops the run after the next one.
    """

    def __init__(self, last: LastCheckpoint) -> None:
        self._last = last
        self._received = 0
        self._agreement = Agreement()
        self._old_handlers: dict[int, Any] = {}
        self._requeue: int | None = None

    def _stop(self, number: int) -> None:
        """Raise Interrupted for a signal; do nothing for 0."""
        if number:
            raise Interrupted(number, requeue=number == self._requeue)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == HANGUP:
            accept_hangup()
            self._old_handlers[number] = signal.SIG_IGN
        elif self._received not in (0, HANGUP):
            self._stop(number)
        if not self._received:
            self._received = number
        self._last.requested = True
        if number == signal.SIGINT:
            note("", "stopping after this step; press Ctrl-C again to stop immediately")

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Connect the ranks, and get SLURM's requeue signal."""
        self._agreement.connect(trainer)
        cluster = trainer._accelerator_connector.cluster_environment
        if isinstance(cluster, SLURMEnvironment):
            if cluster.auto_requeue:
                self._requeue = cluster.requeue_signal
            elif REQUEUE:
                signal.signal(REQUEUE, signal.SIG_DFL)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Register the handlers. Lightning's handlers would end with exit code 0, or without a checkpoint."""
        handled = {*stop_signals(), self._requeue}
        self._old_handlers = {number: signal.signal(number, self._receive) for number in handled if number}

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: ImageClassifier, batch: Batch, batch_idx: int
    ) -> None:
        """Start to exchange the signals of all devices. The step takes longer than the exchange."""
        if trainer.world_size > 1:
            self._agreement.start(self._received)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: ImageClassifier, outputs: object, batch: Batch, batch_idx: int
    ) -> None:
        """Stop within an epoch."""
        number = self._agreement.result() if trainer.world_size > 1 else self._received
        if number and not validates_next(trainer):
            self._stop_within_epoch(trainer, number)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop after a validation within an epoch."""
        if trainer.state.fn == "fit":
            self._stop_within_epoch(trainer, self._agreed())

    def _stop_within_epoch(self, trainer: pl.Trainer, number: int) -> None:
        if number and within_epoch(trainer):
            trainer.save_checkpoint(f"{self._last.dirpath}/last.ckpt")
            self._stop(number)

    def _agreed(self) -> int:
        """Return the signal that any of the devices received, 0 for none. Collective: every rank must call this."""
        self._agreement.start(self._received)
        return self._agreement.result()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop between epochs if there is a checkpoint of the last step; otherwise after the next step."""
        if self._last.is_current(trainer):
            self._stop(self._agreed())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the handlers. Stop if a signal arrived in the last epoch."""
        self._restore_handlers()
        self._stop(self._agreed())

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Restore the handlers."""
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._old_handlers = {}
