"""Learning rate schedules as pure functions of the training progress."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from cifar_lit.errors import UsageError
from cifar_lit.plugins import build_part

SCHEDULES = ("constant", "cosine", "one_cycle", "triangular")


def schedule_factor(name: str, done: float, total: float, warmup: float, final: float) -> float:
    """Return the learning rate after `done` of `total` steps (or epochs), as a multiple of the highest rate.

    Args:
        name: `constant`: 1. `cosine`: half a cosine from 1 to `final` (Loshchilov and Hutter, 2017, without restarts).
            `triangular`: linear from 1 to `final`. `one_cycle`: like cosine, with a cosine warm-up, over 30 % of the
            training if `warmup` is 0 (Smith and Topin, 2018; as torch's OneCycleLR).
        done: steps (or epochs) so far.
        total: steps (or epochs) in total.
        warmup: steps (or epochs) of the rise from `final` to 1.
        final: the factor at the end.
    """
    if name == "one_cycle" and warmup == 0:
        warmup = 0.3 * total
    if done < warmup:
        rise = done / warmup
        return final + (1 - final) * ((1 - math.cos(math.pi * rise)) / 2 if name == "one_cycle" else rise)
    if name == "constant":
        return 1.0
    fall = min(1.0, (done - warmup) / max(total - warmup, 1e-9))
    if name == "triangular":
        return 1 + (final - 1) * fall
    return final + (1 - final) * (1 + math.cos(math.pi * fall)) / 2


class Schedule(LambdaLR):
    """A torch scheduler with the factor `schedule_factor`.

    The optimizer's rates at construction are the highest rates. Rates that are tensors are written in place.

    Args:
        optimizer: the optimizer.
        name, total, warmup, final: see `schedule_factor`. Call `step` once for each unit (step or epoch) of `total`.
        whitening: units over which the rate of the group with role "whitening" falls linearly to 0; None for the common
            schedule.

    Raises:
        UsageError: if the warm-up is as long as the training, or for `whitening` without such a group.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        name: str,
        total: float,
        warmup: float = 0,
        final: float = 0,
        whitening: float | None = None,
    ) -> None:
        if warmup < 0 or warmup >= max(total, 1e-9):
            raise UsageError(f"a warm-up of {warmup:g} takes all of {total:g} steps: lower model.warmup_epochs")

        def factor(done: float) -> float:  # at least 0, for captured steps
            return max(0.0, schedule_factor(name, done, total, warmup, final))

        def whitening_factor(done: float) -> float:
            return max(0.0, 1 - done / whitening) if whitening else factor(done)

        roles = [group.get("role") for group in optimizer.param_groups]
        if whitening and "whitening" not in roles:
            raise UsageError("this net has no whitening layer with a bias to train: set --model.whiten_epochs null")
        factors: list[Callable[[int], float]] = [whitening_factor if role == "whitening" else factor for role in roles]
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))  # LambdaLR would keep the tensor of the rate
        self._whitening = whitening
        super().__init__(optimizer, factors)

    @property
    def whitening_ended(self) -> bool:
        """Whether the rate of the group with role "whitening" has fallen to 0."""
        return self._whitening is not None and self.last_epoch >= self._whitening

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state with rates as floats, and without `whitening`, which is a setting."""
        state = super().state_dict()
        del state["_whitening"]
        return {**state, "_last_lr": [float(rate) for rate in state["_last_lr"]]}


def schedule_from(optimizer: Optimizer, settings: Mapping[str, Any], steps: int, steps_per_epoch: int) -> LRScheduler:
    """Return the schedule for a model's settings. steps: all optimizer steps of the training.

    A class or function, or the import path of one, is called with the optimizer and, if its signature has it,
    `total_steps`. Raises UsageError if the result is not a torch scheduler.
    """
    schedule = settings["schedule"]
    unit = steps_per_epoch if settings["schedule_every"] == "epoch" else 1
    if schedule in SCHEDULES:
        spans = (settings[name] or 0 for name in ("warmup_epochs", "whiten_epochs"))
        warmup, whitening = (epochs * steps_per_epoch / unit for epochs in spans)
        return Schedule(optimizer, schedule, steps / unit, warmup, settings["final_lr"], whitening or None)
    built: LRScheduler = build_part(schedule, "model.schedule", LRScheduler, optimizer, total_steps=steps // unit)
    return built
