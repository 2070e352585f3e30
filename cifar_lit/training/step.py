"""One optimizer step after another inside a `training_step`: forward, backward, clipping, update, rates, sums.

Lightning's own optimization makes one step a call, at 0.2 to 0.5 ms of host time each; here a call makes as many as it is
handed batches. Where the device has graphs of its work (CUDA), a step is captured once for each shape of batch and
replayed from then on, which leaves next to nothing to do for the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer import call
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.training.cuda_graph import Captured, graphs_of

if TYPE_CHECKING:
    from cifar_lit.training.classifier import ImageClassifier

# Callbacks that want to be called here are, which a captured step cannot do.
HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")


class NotFiniteLoss(RuntimeError):
    """The training loss became NaN or infinite; raised before it reaches the weights."""


class Sums:
    """Loss, hits and images of the training steps since the last log line, on the device, and whether a loss was not finite.

    loss, hits: float32 scalars; last: the mean loss of the last batch. broken: 1 once a loss was not finite; steps: how
    many came before that.
    """

    def __init__(self, device: torch.device, loss: float = 0.0, hits: float = 0.0, images: int = 0) -> None:
        self.loss, self.hits = torch.tensor(loss, device=device), torch.tensor(hits, device=device)
        self.images, self.last = images, torch.zeros((), device=device)
        self.broken, self.steps = torch.zeros((), device=device), torch.zeros((), device=device)

    def add(self, loss: Tensor, hits: Tensor, images: int) -> None:
        """Adds a step's mean loss over `images` and its hits; `images` itself is counted by the host."""
        self.loss.add_(loss, alpha=images)
        self.hits.add_(hits)
        self.last.copy_(loss)

    def watch(self, loss: Tensor) -> None:
        """Keeps in mind, on the device, whether this or an earlier loss was not finite."""
        self.broken.copy_(torch.maximum(self.broken, 1.0 - loss.isfinite().float()))
        self.steps.add_(1.0 - self.broken)

    def clear(self) -> None:
        """Starts the next line."""
        self.loss.zero_()
        self.hits.zero_()
        self.images = 0


class Updates(NamedTuple):
    """How gradients become updates: clipped at `clip` (0: not) by norm or value, averaged over `accumulate` batches."""

    clip: float = 0.0
    by_value: bool = False
    accumulate: int = 1


_TAKEN: WeakKeyDictionary[Any, Updates] = WeakKeyDictionary()


def taken_over(trainer: Any) -> Updates:
    """The Trainer's settings of that, which it refuses where it does not optimize itself: it is left with none.

    It may be asked again, by a validation before the fit or by a second fit, and answers the same.
    """
    if trainer not in _TAKEN:
        clip, algorithm = trainer.gradient_clip_val or 0.0, trainer.gradient_clip_algorithm
        by_value = str(algorithm or "").lower().endswith("value")
        _TAKEN[trainer] = Updates(float(clip), by_value, trainer.accumulate_grad_batches)
        trainer.gradient_clip_val, trainer.accumulate_grad_batches = None, 1
    return _TAKEN[trainer]


def can_capture(model: ImageClassifier, updates: Updates) -> bool:
    """Whether the steps of a fit can be recorded as graphs of the device: it has such, and nothing looks in between."""
    trainer: Any = model.trainer
    alone = trainer.world_size == 1 and updates.accumulate == 1 and _scaler(trainer) is None and not _listened(trainer)
    return bool(model.hparams["capture"] and alone and graphs_of(trainer.strategy.root_device))


def _scaler(trainer: Any) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


def _listened(trainer: Any) -> bool:
    """Whether a callback does something in one of `HOOKS`; asked of objects, as LambdaCallback's are not its class's."""
    every = ((getattr(one, hook), getattr(Callback, hook)) for one in trainer.callbacks for hook in HOOKS)
    return any(getattr(own, "__func__", None) is not empty for own, empty in every)


class TrainingStep:
    """Runs the optimizer steps of a fit.

    model: attached to its Trainer. capture: record each step as a graph of the device.
    """

    def __init__(self, model: ImageClassifier, updates: Updates, capture: bool) -> None:
        trainer = model.trainer
        self._model, self._trainer = model, trainer
        self._clip, self._by_value, self._accumulate = updates
        self._smoothing = model.hparams["label_smoothing"]
        self._optimizer = trainer.optimizers[0]
        schedulers = trainer.lr_scheduler_configs
        self._schedule = schedulers[0].scheduler if schedulers and schedulers[0].interval == "step" else None
        self._scaler = _scaler(trainer)
        self._weights = [parameter for parameter in model.net.parameters() if parameter.requires_grad]
        self._progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        self.waiting = 0  # batches whose gradients are added up since the last update; they are in no checkpoint
        self._listened = _listened(trainer)
        self._graphs = graphs_of(model.device) if capture else None
        self._captured: dict[Any, Captured] = {}
        self._made = 0  # updates of this fit
        if self._graphs:
            self._optimizer.found_inf = model.sums.broken  # type: ignore[attr-defined]

    def run(self, batch: Any, last: bool) -> None:
        """One batch; `last` of its epoch. Raises NotFiniteLoss, at once or, when captured, from `check`."""
        if batch.share:
            self._model.sums.images += len(batch.labels)
        if self._graphs is None:
            self._eager(batch, last)
        else:
            key = (tuple(batch.images.shape), batch.share)
            if key not in self._captured:
                self._captured[key] = Captured(self._graphs, self._whole)
            self._captured[key].run(batch)
            self._count()

    def check(self) -> None:
        """Raises NotFiniteLoss if a captured step has met one; waits for the device."""
        if self._graphs is not None and float(self._model.sums.broken):
            self._progress.total.completed -= self._made - int(self._model.sums.steps)
            raise self._not_finite("not finite")

    # ---- what a step is made of

    def _loss(self, images: Tensor, labels: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """The mean loss, and the same weighted with `share`, to go back from; counts loss and hits, of a share of 0 none."""
        logits = self._model.forward(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=self._smoothing)
        with torch.no_grad():
            if share:
                self._model.sums.add(loss.detach(), (logits.argmax(1) == labels).sum(), len(labels))
        return loss, loss if share == 1.0 else loss * share

    def _eager(self, batch: Any, last: bool) -> None:
        plain, loss = self._loss(batch.images, batch.labels, batch.share)
        if not plain.isfinite():
            raise self._not_finite(f"{float(plain.detach())}")
        with torch.autocast(loss.device.type, enabled=False):
            self._model.manual_backward(loss / self._accumulate if self._accumulate > 1 else loss)
            self.waiting += 1
            if self.waiting < self._accumulate and not last:
                return
            self.waiting = 0
            if self._scaler is not None and (self._clip or self._listened):
                self._scaler.unscale_(self._optimizer)
            self._call("on_before_optimizer_step", self._optimizer)
            self._update()
            self._call("on_before_zero_grad", self._optimizer)
            self._optimizer.zero_grad(set_to_none=True)
        self._count()

    def _whole(self, images: Tensor, labels: Tensor, share: float) -> None:
        """A step without the host: no Trainer, no look at a value. A loss that is not finite changes nothing from then on."""
        plain, loss = self._loss(images, labels, share)
        self._model.sums.watch(plain.detach())
        with torch.autocast(loss.device.type, enabled=False):
            loss.backward()
            self._update()
            self._optimizer.zero_grad(set_to_none=True)

    def _update(self) -> None:
        if self._clip and self._by_value:
            torch.nn.utils.clip_grad_value_(self._weights, self._clip)
        elif self._clip:
            torch.nn.utils.clip_grad_norm_(self._weights, self._clip)
        if self._scaler is not None:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        else:
            self._optimizer.step()

    def _count(self) -> None:
        """An optimizer step was made: the Trainer's `global_step` counts it, and the rates go on."""
        self._progress.increment_ready()
        self._progress.increment_completed()
        self._made += 1
        if self._schedule is not None:
            self._schedule.step()

    def _call(self, hook: str, *arguments: Any) -> None:
        if self._listened:
            call._call_callback_hooks(self._trainer, hook, *arguments)

    def _not_finite(self, what: str) -> NotFiniteLoss:
        trainer = self._trainer
        return NotFiniteLoss(f"the loss is {what} at step {trainer.global_step} of epoch {trainer.current_epoch}")
