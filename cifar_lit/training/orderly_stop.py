"""Stop a training after a step on a signal, with a checkpoint of that step."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import Callback, Checkpoint

from cifar_lit.signals import HANGUP, STOP_SIGNALS, accept_hangup, stop_signals
from cifar_lit.text import note
from cifar_lit.training.checkpoint import LastCheckpoint, validates_next, within_epoch


class Interrupted(BaseException):
    """The user or the system asked the run to stop (Ctrl-C, SIGTERM, SIGHUP, SLURM's signal to requeue)."""

    latest: Interrupted | None = None  # matplotlib's compiled code raises "Invalid bounding box" in its place

    def __init__(self, number: int, requeue: bool = False) -> None:
        super().__init__(signal.Signals(number).name)
        Interrupted.latest = self
        self.exit_code = 128 + number
        self.requeue = requeue  # SLURM is to start the job again
        self.resume: str | None = None  # the command that goes on, once it is known


class NoSignalHandlers(Callback):
    """Keeps the Trainer from taking the signals over at the start of each stage, so that they raise `Interrupted` as before it.

    Its handlers write SLURM's checkpoint in the middle of a step, which resumes inexactly, and speak to the other processes
    inside the handler, which can wait for ever. In a training `OrderlyStop` takes the signals, and the processes need not ask
    each other for a SIGTERM before each step, which waits for the device.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Before the Trainer would register them."""
        trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        # with max_steps, Lightning goes on from an epoch's end as from its middle, and counts that epoch twice
        trainer.fit_loop._iteration_based_training = lambda: False  # type: ignore[method-assign]


class OrderlyStop(Checkpoint):
    """Stop the training after the step on Ctrl-C, SIGTERM, SIGHUP or SLURM's requeue signal, with that step in `last.ckpt`.

    A validation that is due right after the step runs first. During validation the epoch ends first, which writes a
    checkpoint anyway. All devices stop at the same step. A second signal stops at once, unless one of the two is SIGHUP: a
    lost session sends several. It is a `Checkpoint` because the Trainer calls those after the callbacks that change what is
    saved, such as the average.
    """

    SIGNALS = STOP_SIGNALS

    def __init__(self, last: LastCheckpoint) -> None:
        self._last = last
        self._received = 0
        self._before: dict[int, Any] = {}
        self._requeue: int | None = None

    def _interrupted(self, number: int) -> Interrupted:
        return Interrupted(number, requeue=number == self._requeue)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == HANGUP:
            accept_hangup()
            self._before[number] = signal.SIG_IGN
        elif self._received not in (0, HANGUP):
            raise self._interrupted(number)
        self._received = self._received or number
        self._last.asked_for = True
        if (
            number == signal.SIGINT
        ):  # typed by somebody who looks; a scheduler may send others to what cannot go on anyway
            note("", "stopping after this step; once more to stop at once")

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Learns from SLURM's plugin which signal asks for a requeue."""
        cluster = trainer._accelerator_connector.cluster_environment
        if isinstance(cluster, SLURMEnvironment):
            self._requeue = cluster.requeue_signal if cluster.auto_requeue else None
            if not cluster.auto_requeue:
                signal.signal(signal.SIGUSR1, signal.SIG_DFL)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the signals over from Lightning, which would end with exit code 0 or without a checkpoint."""
        handled = set(self.SIGNALS).intersection(stop_signals()) | {self._requeue}
        self._before = {number: signal.signal(number, self._receive) for number in handled if number}

    def _agreed(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> int:
        """The signal that any of the devices received, 0 for none."""
        if trainer.world_size == 1:
            return self._received
        received = torch.tensor(self._received, device=pl_module.device)
        # not strategy.reduce, which adds a barrier: this runs at every step
        torch.distributed.all_reduce(received, op=torch.distributed.ReduceOp.MAX)
        return int(received)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stops in the middle of an epoch; at its end, a checkpoint comes anyway."""
        if (self._received or trainer.world_size > 1) and not validates_next(trainer):
            self._stop_within_epoch(trainer, pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops after a validation in the middle of an epoch."""
        if trainer.state.fn == "fit":
            self._stop_within_epoch(trainer, pl_module)

    def _stop_within_epoch(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if within_epoch(trainer) and (number := self._agreed(trainer, pl_module)):
            trainer.save_checkpoint(f"{self._last.dirpath}/last.ckpt")
            raise self._interrupted(number)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops between epochs, where the last one has left its checkpoint; where it has left none, after the next step."""
        if self._last.is_of(trainer) and (number := self._agreed(trainer, pl_module)):
            raise self._interrupted(number)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gives the signals back; one that came in the last epoch counts now."""
        self._give_back()
        if self._received:
            raise self._interrupted(self._received)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Gives the signals back."""
        self._give_back()

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
