"""The loop of `train --seeds` and `train --folds`: several trainings, one after the other, each in its run."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cifar_lit.base.errors import UsageError
from cifar_lit.base.files import display_path
from cifar_lit.base.hardware import is_one_device
from cifar_lit.base.text import say
from cifar_lit.cli.console import say_wrapped, unbroken
from cifar_lit.cli.fit import Training, run_command
from cifar_lit.cli.flags import Command
from cifar_lit.run.record import read_metrics
from cifar_lit.run.resume import is_finished, newest_checkpoint
from cifar_lit.runs.compare import read_run


def check_several(command: Command) -> None:
    """Raise UsageError for flags that are incompatible with --seeds or --folds, which use one device."""
    flags = " and ".join(f"--{name}" for name in command.several)
    devices = command.value("trainer.devices")
    if command.name != "train":
        raise UsageError(f"{flags} trains and tests: use it with `train`, not `{command.name}`")
    if len(command.several) > 1:
        raise UsageError(f"{flags} are different sets of trainings: leave one of them out")
    if command.resume is not None:
        raise UsageError(f"{flags} cannot be used with --resume: leave it out (--seeds continues its trainings itself)")
    if devices is None:
        devices = "1"
        command.flags.append("--trainer.devices=1")
    if os.environ.get("WORLD_SIZE", "1") != "1" or not is_one_device(devices):
        raise UsageError(f"{flags} trains on one device: leave --devices out, or name one")


def train_each(
    command: Command,
    trainings: Mapping[str, Mapping[str, object]],
    logs: Path | None = None,
    after: Callable[[Training], None] = lambda training: None,
) -> list[Path]:
    """Train and test once with the settings of each training, and print a line for each. Return the run folders.

    Args:
        command: the command. Its flags for several trainings are ignored.
        trainings: settings by dotted name, in addition to the command's, by the title of the training.
        logs: folder for these runs only. Finished runs in it are not repeated, and others are resumed. Default: new
            runs in the folder of all runs.
        after: called after each training, with its data and predictions still in memory.
    """
    runs = []
    has_card = False
    for title, settings in trainings.items():
        flags = [f"--{name}={value}" for name, value in settings.items()]
        training = replace(command, several={}, brief=has_card, flags=[*command.flags, *flags])
        training.is_part = True
        run = None
        if logs:
            training.logs = str(logs)
            run = _find_run(logs, settings)
        state = " is finished"
        if run is None or not is_finished(run, needs_test=True):
            if run:
                training.resume = str(run)
            say(title)
            run = _train(training, after)
            state, has_card = "", True
        accuracy = read_metrics(run)["test"]["accuracy"]
        say_wrapped(f"{title}: test accuracy {accuracy:.4f} · {unbroken(display_path(run))}{state}")
        runs.append(run)
    return runs


def _train(command: Command, after: Callable[[Training], None]) -> Path:
    training = run_command(command)
    if training.model.predictions is None:
        raise UsageError("each of these trainings has to end with a test: leave out flags that shorten the training")
    after(training)
    run = training.run.folder.path
    del training
    gc.collect()  # net and Trainer refer to each other and would keep device memory
    return run


def _find_run(logs: Path, settings: Mapping[str, Any]) -> Path | None:
    """Return the run with these settings, if it is finished or can be resumed."""
    for config in logs.glob("*/config.yaml"):
        run = config.parent
        if not settings.items() <= read_run(run).settings.items():
            continue
        if is_finished(run, needs_test=True) or newest_checkpoint(run).is_file():
            return run
    return None


def mean_text(spread: Mapping[str, Any]) -> str:
    """Return a mean with its standard deviation and the number of trainings."""
    text = f"{spread['mean']:.4f}"
    if spread["n"] > 1:
        text += f" ± {spread['std']:.4f}"
    return f"{text} · n = {spread['n']}"
