"""Several trainings by one command, such as `--folds` and `--learning-curve`: one after the other, each in its run."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cifar_lit.bench.process import started
from cifar_lit.cli.fit import TrainingCLI
from cifar_lit.cli.flags import ONE_DEVICE, Command
from cifar_lit.cli.quiet import catch_signals
from cifar_lit.errors import Failure, UsageError
from cifar_lit.runs.compare import read_run
from cifar_lit.runs.run_folder import CHECKPOINTS, display_path, is_finished
from cifar_lit.signals import stop_signals
from cifar_lit.text import say


def check_several(command: Command, flag: str, resume_remedy: str) -> None:
    """Raise UsageError for flags that are incompatible with `flag`. Several trainings use one device by default."""
    launched = os.environ.get("WORLD_SIZE", "1") != "1"
    faults = {
        f"trains and tests: use it with `train` or scripts/train.py, not `{command.name}`": command.name != "train",
        "trains on other images than --folds: leave one of them out": command.folds and command.learning_curve,
        resume_remedy: command.resume is not None,
        "trains on one machine: leave --nodes out": command.value("trainer.num_nodes") not in (None, "1"),
        "starts its trainings itself: use --devices N without torchrun or srun": launched,
    }
    for fault in filter(faults.get, faults):
        raise UsageError(f"{flag} {fault}")
    if command.value("trainer.devices") is None:
        command.flags.append("--trainer.devices=1")


def train_each(
    command: Command,
    trainings: Mapping[str, Mapping[str, Any]],
    logs: Path | None = None,
    after: Callable[[TrainingCLI], None] = lambda cli: None,
) -> list[Path]:
    """Train and test once with the settings of each training. Return the run folders.

    On one device, the trainings share this process. On several, each has processes of its own, as Lightning starts the
    further ranks by repeating the command.

    Args:
        command: the command, without the flag of the several trainings.
        trainings: settings by dotted name, in addition to the command's, by the title of the training.
        logs: folder for these runs only. Finished runs in it are not repeated, and others are resumed. Default: new
            runs in the folder of all runs, on one device.
        after: called after each training in this process, with its data and predictions still in memory.
    """
    runs = []
    for title, settings in trainings.items():
        run = find_run(logs, settings)
        done = run is not None and is_finished(run, needs_test=True)
        say(f"{title}: {display_path(run)} is finished" if run and done else title)
        flags = [f"--{name}={value}" for name, value in settings.items()]
        if not done and re.fullmatch(ONE_DEVICE, command.value("trainer.devices") or "1"):
            place = str(logs) if logs else command.logs
            resume = str(run) if run else None
            cli = TrainingCLI(replace(command, flags=[*command.flags, *flags], logs=place, resume=resume))
            run = None if cli.model.predictions is None else cli.run.folder.path
            after(cli)
            del cli
            gc.collect()  # net and Trainer refer to each other and would keep device memory
        elif not done:
            train_in_processes([*command.words, *flags, f"--logs={logs}", *([f"--resume={run}"] if run else [])])
            run = find_run(logs, settings)
        if run is None or not is_finished(run, needs_test=True):
            raise Failure("a training ended without a test: leave out flags that shorten the training")
        runs.append(run)
    return runs


def find_run(logs: Path | None, settings: Mapping[str, Any]) -> Path | None:
    """Return a finished run with these settings, else one that can be resumed, or None."""
    configs = logs.glob("*/config.yaml") if logs else ()
    runs = [run.path for config in configs if settings.items() <= (run := read_run(config.parent)).settings.items()]
    resumable = [run for run in runs if any((run / name).is_file() for name in CHECKPOINTS)]
    return next((run for run in runs if is_finished(run, needs_test=True)), next(iter(resumable), None))


def train_in_processes(words: Sequence[str]) -> None:
    """Run `train` with these arguments in a process group of its own, which gets the stop signals of this process.

    Raise SystemExit with its exit code if it fails: it has printed the reason.
    """
    with started([sys.executable, "-m", "cifar_lit", "train", *words]) as process:
        for number in stop_signals():
            signal.signal(number, lambda number, frame: process.send_signal(number))
        code = process.wait()
    catch_signals()
    if code:
        raise SystemExit(code if code > 0 else 128 - code)
