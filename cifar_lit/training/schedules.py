"""Learning rate schedules as pure functions of how far the training has come."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from cifar_lit.errors import UsageError, nearest

SCHEDULES = ("constant", "cosine", "one_cycle", "triangular")


def schedule_factor(name: str, done: float, total: float, warmup: float, final: float) -> float:
    """The learning rate at `done` of `total` steps (or epochs), as a multiple of the highest one.

    warmup: steps (or epochs) of rise from `final` to 1 before the schedule proper; final: the factor at the end.

    constant: 1. cosine: half a cosine from 1 to final (Loshchilov and Hutter, 2017, without restarts). triangular:
    linear from 1 to final. one_cycle: like cosine, with a cosine rise as well, over 30 % of the training if `warmup`
    is 0 (Smith and Topin, 2018, as torch's OneCycleLR anneals).
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
    """A torch scheduler whose factor is `schedule_factor`; step it per optimizer step or per epoch, as `total` counts.

    Rates may be tensors, which are written in place without waiting for the device; state dicts hold plain numbers.

    Args:
        optimizer: its groups' rates are the highest ones.
        name: one of SCHEDULES.
        total: steps (or epochs) of the training.
        warmup: see `schedule_factor`.
        final: see `schedule_factor`.
        whitening: after how many steps (or epochs) the rate of the group with the role "whitening" has fallen to 0, in a
            straight line from its highest; None for the schedule of the others.

    Raises UsageError for an unknown name, a warm-up that is as long as the training, or `whitening` without such a group.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        name: str,
        total: float,
        warmup: float = 0.0,
        final: float = 0.0,
        *,
        whitening: float | None = None,
    ) -> None:
        check_schedule(name, final)
        if warmup < 0 or warmup >= max(total, 1e-9):
            raise UsageError(f"a warm-up of {warmup:g} leaves nothing of {total:g} to train: lower model.warmup_epochs")

        def factor(done: float) -> float:
            return max(0.0, schedule_factor(name, done, total, warmup, final))  # a captured step must see no negative rate

        factors: list[Callable[[int], float]] = [factor] * len(optimizer.param_groups)
        if whitening is not None:
            end = whitening
            whitened = [index for index, group in enumerate(optimizer.param_groups) if group.get("role") == "whitening"]
            if not whitened:
                raise UsageError("this net has no whitening layer with a bias to train: set --model.whiten_epochs null")
            for index in whitened:
                factors[index] = lambda done: max(0.0, 1 - done / end)
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))  # never a tensor: it could be the rate's own
        super().__init__(optimizer, factors)

    def state_dict(self) -> dict[str, Any]:
        """torch's, with plain numbers for the rates."""
        state = super().state_dict()
        return {**state, "_last_lr": [float(rate) for rate in state["_last_lr"]]}


def schedule_from(optimizer: Optimizer, settings: Mapping[str, Any], steps: int, steps_per_epoch: int) -> Schedule:
    """The schedule of a model's settings for a training of so many optimizer steps, stepped as `schedule_every` says."""
    unit = steps_per_epoch if settings["schedule_every"] == "epoch" else 1
    warmup = settings["warmup_epochs"] * steps_per_epoch / unit
    whitening = settings["whiten_epochs"]
    end = None if whitening is None else whitening * steps_per_epoch / unit
    return Schedule(optimizer, settings["schedule"], steps / unit, warmup, settings["final_lr"], whitening=end)


def check_schedule(name: str, final: float) -> None:
    """Raises UsageError when a schedule of this name and final factor cannot be meant."""
    if name not in SCHEDULES:
        raise UsageError(f"model.schedule must be one of {', '.join(SCHEDULES)}, not {name!r}.{nearest(name, SCHEDULES)}")
    if not 0 <= final <= 1:
        raise UsageError(f"model.final_lr is a fraction of model.lr, 0 … 1, not {final:g}")


def check_training(label_smoothing: float, schedule: str, schedule_every: str, warmup_epochs: float, ema_decay: float) -> None:
    """Raises UsageError when these settings of a training cannot be meant, or not together."""
    if schedule_every not in ("step", "epoch"):
        raise UsageError(f"model.schedule_every must be step or epoch, not {schedule_every!r}")
    if schedule_every == "epoch" and (warmup_epochs or schedule == "one_cycle"):
        raise UsageError("a warm-up by the epoch would train the first one at final_lr: use model.schedule_every step")
    if not 0 <= label_smoothing < 1:
        raise UsageError(f"model.label_smoothing must be in 0 … 1, not {label_smoothing:g}")
    if not 0 <= ema_decay < 1:
        raise UsageError(f"model.ema_decay must be 0 for none or below 1, not {ema_decay:g}")
