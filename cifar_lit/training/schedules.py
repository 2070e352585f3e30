"""Learning rate schedules as pure functions of the training progress."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from cifar_lit.base.errors import UsageError, check_choice
from cifar_lit.base.plugins import accepted_arguments, build_part, find_part, part_name
from cifar_lit.base.settings import options_of

SCHEDULES = ("constant", "cosine", "one_cycle", "triangular")
OPTIONS = "model.schedule_options"


@dataclass(frozen=True)
class ScheduleSettings:
    """Settings of our schedules.

    Args:
        warmup_epochs: epochs of linear warm-up before the schedule (may be a fraction).
        every: update the learning rate every step or every epoch.
    """

    warmup_epochs: float = 0.0
    every: str = "step"

    def __post_init__(self) -> None:
        check_choice(f"{OPTIONS}.every", self.every, ("step", "epoch"))


def schedule_settings(name: str, options: Mapping[str, object] | None) -> ScheduleSettings | None:
    """Return the settings of one of SCHEDULES, None for an import path. Raise UsageError for other names or options."""
    if "." in name:  # an import path, or the name of a class
        return None
    check_choice("model.schedule", name, (*SCHEDULES, "an import path"))
    settings = options_of(ScheduleSettings, options, OPTIONS, f"{name} has")
    if settings.every == "epoch" and (settings.warmup_epochs or name == "one_cycle"):
        raise UsageError(f"with a warm-up, the first epoch would train at a rate of 0: use {OPTIONS}.every step")
    return settings


def schedule_factor(name: str, done: float, total: float, warmup: float) -> float:
    """Return the learning rate after `done` of `total` steps (or epochs), as a multiple of the highest rate.

    Args:
        name: `constant`: 1. `cosine`: half a cosine from 1 to 0 (Loshchilov and Hutter, 2017, without restarts).
            `triangular`: linear from 1 to 0. `one_cycle`: like cosine, with a cosine warm-up, over 30 % of the training
            if `warmup` is 0 (Smith and Topin, 2018; torch's OneCycleLR, but without its cycle of the momentum).
        done: steps (or epochs) so far.
        total: steps (or epochs) in total.
        warmup: steps (or epochs) of the rise from 0 to 1.
    """
    if name == "one_cycle" and warmup == 0:
        warmup = 0.3 * total
    if done < warmup:
        rise = done / warmup
        if name == "one_cycle":
            return (1 - math.cos(math.pi * rise)) / 2
        return rise
    if name == "constant":
        return 1.0
    fall = min(1.0, (done - warmup) / max(total - warmup, 1e-9))
    if name == "triangular":
        return 1 - fall
    return (1 + math.cos(math.pi * fall)) / 2


class Schedule(LambdaLR):
    """A torch scheduler with the factor `schedule_factor`.

    The optimizer's rates at construction are the highest rates.

    Args:
        name, total, warmup: see `schedule_factor`. Call `step` once for each unit (step or epoch) of `total`.

    Raises:
        UsageError: if the warm-up is as long as the training.
    """

    def __init__(self, optimizer: Optimizer, name: str, total: float, warmup: float = 0) -> None:
        if warmup >= max(total, 1e-9):
            raise UsageError(f"a warm-up of {warmup:g} takes all of {total:g} steps: lower {OPTIONS}.warmup_epochs")
        super().__init__(optimizer, partial(schedule_factor, name, total=total, warmup=warmup))

    def end_early(self, role: str, length: float) -> None:
        """Let the rates of the groups with a role fall linearly to 0 over `length` steps (or epochs)."""
        for index, group in enumerate(self.optimizer.param_groups):
            if group.get("role") == role:
                self.lr_lambdas[index] = partial(_linear_to_zero, length)
                rate = group["initial_lr"] * self.lr_lambdas[index](self.last_epoch)
                self._last_lr[index] = group["lr"] = rate


def _linear_to_zero(length: float, done: float) -> float:
    return max(0.0, 1 - done / length)


def schedule_from(
    optimizer: Optimizer, schedule: Any, options: Mapping[str, object], steps: int, steps_per_epoch: int
) -> LRScheduler:
    """Return a schedule for all steps of a training.

    Args:
        schedule: one of SCHEDULES; or a torch scheduler, which is returned; or a class or function, or the import path
            of one, which is called with the optimizer, the options and, if its signature has it, `total_steps`.
        options: settings of the schedule; `every` says whether it is updated every step or every epoch.
        steps: optimizer steps of the training.

    Raises:
        UsageError: for an invalid option, or a result that is not a torch scheduler.
    """
    settings = schedule_settings(part_name(schedule), options)
    unit = steps_per_epoch if options.get("every") == "epoch" else 1
    if settings:
        warmup = settings.warmup_epochs * steps_per_epoch / unit
        return Schedule(optimizer, schedule, steps / unit, warmup)
    arguments = {name: value for name, value in options.items() if name != "every"}
    if not isinstance(schedule, LRScheduler):
        accepted = accepted_arguments(find_part(schedule), arguments)
        if refused := [name for name in arguments if name not in accepted]:
            fault = f"{part_name(schedule)} takes no {refused[0]}"
            raise UsageError(f"{fault}: leave {OPTIONS}.{refused[0]} out")
    total = steps // unit
    built: LRScheduler = build_part(schedule, LRScheduler, optimizer, total_steps=total, **arguments)
    return built
