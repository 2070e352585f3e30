"""The training loss: that of the task, and the changes of it that features make."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from cifar_lit.base.plugins import NameOrObject, build_part
from cifar_lit.data.image_set import Batch
from cifar_lit.training.task import OneLabel, Task, check_task

Change = Callable[[Tensor, Tensor, Batch], Tensor]  # losses (B,), logits (B, classes), batch -> losses (B,)


class Loss:
    """The loss of a task with label smoothing, averaged over the images of a batch.

    Override `compute` for another loss.

    Args:
        label_smoothing: share of the target spread over all classes.

    Attributes:
        task: what a label is; the model sets it.
        changes: functions that change the losses of the images before their mean is taken. Each fit begins without:
            a callback appends its function in `setup`.
    """

    task: Task = OneLabel()

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing
        self.changes: list[Change] = []

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss of a batch with logits (B, classes), a scalar."""
        check_task(self.task, batch.labels)
        targets = batch.targets
        if targets is None:
            targets = batch.labels
        if not self.changes:
            return self.compute(logits, targets, "mean")
        losses = self.compute(logits, targets, "none")
        for change in self.changes:
            losses = change(losses, logits, batch)
        return losses.mean()

    def compute(self, logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
        """Return the losses (B,) of the images for the reduction `none`, their mean for `mean`.

        targets: labels as in `data.image_set.Batch`, or shares of the classes, float32 (B, classes).
        """
        return self.task.loss(logits, targets, self.label_smoothing, reduction)


def build_loss(loss: NameOrObject, label_smoothing: float) -> Loss:
    """Return the loss of a model, which may be given as an object, a class, a function or an import path."""
    if loss == "cross_entropy":
        loss = Loss
    built: Loss = build_part(loss, Loss, label_smoothing=label_smoothing)
    return built
