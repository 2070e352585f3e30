"""`--time-limit 10m`: choose the recipe and its epochs from a short measurement, so that the training ends in time.

The choice is added to the typed flags, so that config.yaml repeats the training and a resumed run is exact.
"""

from __future__ import annotations

import gc
import math
import re
import time
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningCLI

from cifar_lit import hardware
from cifar_lit.cli import trust
from cifar_lit.cli.fit import TrainingCLI
from cifar_lit.cli.flags import Command, recipe_names, recipe_path
from cifar_lit.cli.recipes import measured, recipe_header
from cifar_lit.data.resolution import side_at
from cifar_lit.errors import UsageError
from cifar_lit.text import duration_text, say
from cifar_lit.training.callbacks import NoProfiler, wait_for_device
from cifar_lit.training.orderly_stop import NoSignalHandlers

RECIPES = {"cpu": ("laptop91", "laptop"), "gpu": ("fast94", "fast95", "fast96")}  # the shortest first
SHORTEST, LONGEST = 0.5, 2.0  # times the epochs of a recipe
FULL_SIZE = 0.5  # least share of the planned epochs at full size that are kept
PARTS = 10  # per epoch: lengths are multiples of one part, unless a validation ends each epoch
STEPS, WARM_UP = 5, 2  # fewest measured steps of an image size, and how many of them are not counted
SLOW = 3.0  # times the planned duration, after which two steps suffice
# Shares of the limit: for measured steps, and left unplanned, because whole epochs take longer than first steps.
MEASURED, SPARE = 0.03, 0.08
TAIL = 0.3  # times the start of the process: time to write results and report


class Stopwatch(Callback):
    """Record when steps end, and stop a fit after `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.created = seconds, time.monotonic()
        self.times: list[float] = []  # start of the first step, then the end of each step

    @property
    def step(self) -> float:
        """Mean seconds of a step after the warm-up."""
        times = self.times[min(WARM_UP, len(self.times) - 2) :]
        return (times[-1] - times[0]) / (len(times) - 1)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        """Record the start of the first step, after whitening, compilation and the fit of a last layer."""
        self.times = self.times or [time.monotonic()]

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        """Record the end of a step."""
        wait_for_device(pl_module)
        self.times.append(time.monotonic())
        spent = self.times[-1] - self.times[0]
        least = STEPS if spent < SLOW * self.seconds else 2
        trainer.should_stop = len(self.times) > least and spent > self.seconds

    on_test_batch_start = on_train_batch_start  # type: ignore[assignment]
    on_test_batch_end = on_train_batch_end  # type: ignore[assignment]


class Probe(TrainingCLI):
    """Measure a few steps of a training at each image size, instead of running it.

    Args:
        command: the training.
        seconds: duration of the measurement.
        start_up: seconds from the start of the process to the first measurement.
    """

    def __init__(self, command: Command, seconds: float, start_up: float) -> None:
        self.began, self.seconds, self.start_up = time.monotonic(), seconds, start_up
        super().__init__(command)

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Record the time of the set-up. Each measurement has a Trainer of its own."""
        self.setup_seconds = time.monotonic() - self.began
        trainer = self.settings.trainer
        if hardware.count_devices(self.machine, trainer.accelerator, trainer.devices) * trainer.num_nodes > 1:
            raise UsageError("--time-limit measures one device: add --devices 1")
        if teacher := self.settings.model.teacher:
            self.model.teacher = trust.load_teacher(str(teacher), self.command.trust)

    def _run_subcommand(self, subcommand: str) -> None:
        data, size = self.datamodule, self.datamodule.eval_batch_size
        sides = [*data.resolutions, None]
        fits = {side: self._watch("fit", side, self.seconds / len(sides)) for side in sides}
        self.steps = {side: fit.step for side, fit in fits.items()}
        self.batches = int(self.trainer.num_training_batches)
        self.parts = 1 if len(data.split[1]) or self.trainer.accumulate_grad_batches > 1 else PARTS
        batch = self._watch("test").step  # only its time is used
        self.validation, test = (-(-len(rows) // size) * batch for rows in (data.split[1], data.test_images))
        # Decoded images are cached, so the next set-up is not slower than the start.
        begin = min(self.setup_seconds, self.start_up) + fits[sides[0]].times[0] - fits[sides[0]].created
        after = TAIL * self.start_up + (test if self.command.name == "train" else self.validation)
        self.fixed = time.monotonic() - self.command.started + begin + after

    def _watch(self, act: str, side: int | None = None, seconds: float = math.inf) -> Stopwatch:
        """Return the times of a short `fit` or `test`."""
        watch = Stopwatch(seconds)
        self.datamodule.side = lambda epoch: side  # type: ignore[method-assign]
        bare = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "limit_val_batches"), False)
        own: dict[str, Any] = {"callbacks": [NoSignalHandlers(), watch], "profiler": NoProfiler()}
        self.trainer = LightningCLI.instantiate_trainer(self, **own, **bare, limit_test_batches=2)
        settings = {} if act == "fit" else {"verbose": False}
        getattr(self.trainer, act)(self.model, datamodule=self.datamodule, **settings)
        if not watch.times:
            raise UsageError("--time-limit needs training steps: set model.unfreeze true")
        return watch

    def end(self, epochs: float) -> float:
        """Return the seconds from start to end of a training; infinity if too few epochs are at full size."""
        sizes, count = self.datamodule.resolutions, math.ceil(epochs)
        sides = {epoch: side_at(sizes, epoch, count) for epoch in range(count)}
        full = epochs - sum(side is not None for side in sides.values())
        if full < FULL_SIZE * (1 - sum(sizes.values())) * epochs - 1e-9:
            return math.inf
        steps = sum(min(1.0, epochs - epoch) * self.steps[side] for epoch, side in sides.items())
        return self.fixed + self.batches * steps + count * self.validation

    def claim(self, longer: float) -> str:
        """Return the expected accuracy as a clause; "" unless images and settings are those of a measured recipe."""
        name, changed = self.command.recipe, re.search(r"--(model|data)\.(?!root=)", " ".join(self.command.flags))
        if changed or self.command.configs or name not in recipe_names():
            return ""
        accuracy, data, *_ = measured(recipe_header(recipe_path(name)))
        relation = "more than " if longer > 0 else "less than " if longer else ""
        return f"; expected accuracy: {relation}{accuracy}" if data == self.settings.data.dataset else ""


def train_in_time(command: Command) -> None:
    """Train with the recipe and the number of epochs that fit the limit. A resumed run keeps its own."""
    limit, start_up = _limit(command), time.monotonic() - command.started
    if command.resume is not None or command.asks_only:
        TrainingCLI(command)
        return
    named = bool(command.recipe or command.configs or command.value("model.net"))
    on_gpu = command.value("trainer.accelerator") != "cpu" and hardware.detect_machine().gpus
    result: Any = None
    for recipe in [command.recipe] if named else RECIPES["gpu" if on_gpu else "cpu"]:
        probe = Probe(replace(command, recipe=recipe, flags=[*command.flags]), MEASURED * limit, start_up)
        usual, parts = probe.settings.trainer.max_epochs, probe.parts
        least = 1 if named else SHORTEST * usual
        lengths = [part / parts for part in range(math.ceil(least * parts), int(LONGEST * usual * parts) + 1)]
        ends = {length: probe.end(length) for length in lengths}
        fitting = [length for length, end in ends.items() if end <= (1 - SPARE) * limit]
        if not fitting and result is None:
            seconds = math.ceil(min(ends.values()) / (1 - 2 * SPARE))
            raise UsageError(f"--time-limit {command.time_limit} is too short on this machine: use {seconds}s or more")
        if not fitting:
            break
        length = fitting[-1]
        flags = [f"--trainer.max_epochs={math.ceil(length)}"]
        flags += [] if length.is_integer() else [f"--trainer.max_steps={round(length * probe.batches)}"]
        what = f"{probe.settings.recipe or 'the configuration'} with {length:g} epochs instead of {usual}"
        claim = f"expected end after {duration_text(ends[length])}{probe.claim(length - usual)}"
        result = recipe, flags, f"{what}, {claim}"
        if length < lengths[-1]:
            break
    del probe
    gc.collect()  # net and Trainer refer to each other and would keep device memory
    recipe, flags, line = result
    say(f"--time-limit {command.time_limit}: {line}")
    TrainingCLI(replace(command, recipe=recipe, flags=[*command.flags, *flags]))


def _limit(command: Command) -> float:
    """Return the limit in seconds. Raise UsageError if it is invalid, or excluded by other flags."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", command.time_limit or "")
    limit = float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]] if match else 0.0
    lengths = any(command.value(f"trainer.{flag}") for flag in ("max_epochs", "max_steps", "max_time"))
    resumes = command.resume is not None
    faults = {
        f"must be a time such as 90s, 10m or 2h, not {command.time_limit}": not 0 < limit < math.inf,
        "is for a single new training: leave it out": not (command.is_one_training or command.asks_only),
        "measures the configured steps: leave --auto-batch and --auto-lr out": command.auto and not resumes,
        "chooses the number of epochs: leave --epochs and other limits out": lengths and not resumes,
    }
    for fault in filter(faults.get, faults):
        raise UsageError(f"--time-limit {fault}")
    return limit
