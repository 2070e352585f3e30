"""Several trainings by one command, `--folds` and `--seeds`: one after the other, each in its run."""

from __future__ import annotations

import gc
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from hashlib import sha256
from io import StringIO
from pathlib import Path
from typing import Any

from rich.table import Table

from cifar_lit.cli.console import for_tables
from cifar_lit.cli.fit import TrainingCLI, program
from cifar_lit.cli.flags import Command, recipe_path
from cifar_lit.cli.launch import logs_of
from cifar_lit.cli.processes import ask_to_stop, started
from cifar_lit.cli.quiet import catch_signals
from cifar_lit.cli.run_report import FIGURES as TITLES
from cifar_lit.errors import Failure, UsageError
from cifar_lit.files import read_text, write_text
from cifar_lit.hardware import is_one_device
from cifar_lit.runs.compare import read_run
from cifar_lit.runs.run_folder import RunFolder, display_path, is_finished, newest_checkpoint, read_json, read_metrics
from cifar_lit.signals import STOP_SIGNALS, stop_signals
from cifar_lit.text import say
from cifar_lit.training.orderly_stop import Interrupted


def check_several(command: Command, flag: str, resume_remedy: str, setting: str | None = None) -> None:
    """Raise UsageError for flags that are incompatible with `flag`. Several trainings use one device by default.

    setting: the setting that differs between the trainings.
    """
    others = [f"--{name}" for name in command.several if f"--{name}" != flag]
    fault = ""
    if command.name != "train":
        fault = f"trains and tests: use it with `train` or scripts/train.py, not `{command.name}`"
    elif others:
        fault = f"and {' and '.join(others)} are different sets of trainings: leave one of them out"
    elif setting and command.value(setting) is not None:
        fault = f"sets {setting}: leave it out"
    elif command.resume is not None:
        fault = resume_remedy
    elif command.value("trainer.num_nodes") not in (None, "1"):
        fault = "trains on one machine: leave --nodes out"
    elif os.environ.get("WORLD_SIZE", "1") != "1":
        fault = "starts its trainings itself: use --devices N without torchrun or srun"
    if fault:
        raise UsageError(f"{flag} {fault}")
    if command.value("trainer.devices") is None:
        command.flags.append("--trainer.devices=1")


def train_each(
    command: Command,
    trainings: Mapping[str, Mapping[str, object]],
    logs: Path | None = None,
    after: Callable[[TrainingCLI], None] = lambda cli: None,
) -> list[Path]:
    """Train and test once with the settings of each training, with a line of output each. Return the run folders.

    On one device, the trainings share this process. On several, each has processes of its own, as Lightning starts the
    further ranks by repeating the command.

    Args:
        command: the command. Its flags for several trainings are ignored.
        trainings: settings by dotted name, in addition to the command's, by the title of the training.
        logs: folder for these runs only. Finished runs in it are not repeated, and others are resumed. Default: new
            runs in the folder of all runs, on one device.
        after: called after each training in this process, with its data and predictions still in memory.
    """
    runs = []
    for title, settings in trainings.items():
        run = find_run(logs, settings)
        state = " is finished"
        if run is None or not is_finished(run, needs_test=True):
            state = ""
            flags = [f"--{name}={value}" for name, value in settings.items()]
            if is_one_device(command.value("trainer.devices") or "1"):
                run = _train_here(replace(command, flags=[*command.flags, *flags]), logs, run, after)
            else:
                if run is not None:
                    flags.append(f"--resume={run}")
                train_in_processes([*command.words, *flags, f"--logs={logs}"])
                run = find_run(logs, settings)
        if run is None or not is_finished(run, needs_test=True):
            raise Failure("a training ended without a test: leave out flags that shorten the training")
        accuracy = read_metrics(run)["test"]["accuracy"]
        say(f"{title}: test accuracy {accuracy:.4f} · {display_path(run)}{state}")
        runs.append(run)
    return runs


def _train_here(
    command: Command, logs: Path | None, resumed: Path | None, after: Callable[[TrainingCLI], None]
) -> Path | None:
    """Train and test in this process; return the run folder, None without a test."""
    command = replace(command, several={}, brief=True)
    if logs is not None:
        command.logs = str(logs)
    if resumed is not None:
        command.resume = str(resumed)
    output: AbstractContextManager[object] = nullcontext()  # a terminal shows the bar
    if not sys.stdout.isatty():
        output = redirect_stdout(StringIO())
    with output:
        cli = TrainingCLI(command)
    run = None
    if cli.model.predictions is not None:
        run = cli.run.folder.path
    after(cli)
    del cli
    gc.collect()  # net and Trainer refer to each other and would keep device memory
    return run


def check_one_device(devices: str | None, what: str) -> None:
    """Raise UsageError if --devices selects several devices. what: begins the message, such as "--folds trains"."""
    if devices is not None and not is_one_device(devices):
        raise UsageError(f"{what} on one device, not on --devices {devices}: use 1, or an id such as [0]")


@contextmanager
def group_folder(
    command: Command, suffix: str, file: str, continues: Callable[[dict[str, object]], bool]
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield a locked folder for the trainings of a command, and the record that its `file` begins with.

    It is a new folder, or an earlier one of the same command and settings. If the first training fails before it has a
    folder of its own, the new folder is removed. An interruption names the command that continues these trainings.

    Args:
        suffix: end of the folder's name, after the recipe's name.
        file: name of the JSON file with record and results.
        continues: whether to continue the trainings of a folder, by the content of its `file`.
    """
    name, logs = suffix, logs_of(command)
    files = [Path(config).expanduser() for config in command.configs]
    if command.recipe:
        files.insert(0, recipe_path(command.recipe))
        name = f"{files[0].stem}-{suffix}"
    texts = "\0".join(read_text(path) for path in files)
    record = {"command": command.words, "settings": sha256(texts.encode()).hexdigest()}
    earlier = None
    for path in logs.glob(f"*/{file}"):
        content = read_json(path)
        if record.items() <= content.items() and continues(content):
            earlier = path.parent
            break
    folder = RunFolder(logs, name, earlier)
    record |= command.several
    try:
        write_text(folder.path / file, json.dumps(record) + "\n")
        yield folder.path, record
    except Interrupted as interruption:
        words = list(command.words)
        for name, value in command.several.items():
            words.append(f"--{name}={value}".removesuffix("="))
        if command.json:
            words.append(f"--json={command.json}")
        interruption.resume = f"{program('train')} {shlex.join(words)}"
        raise
    finally:
        folder.release()
        if [entry.name for entry in folder.path.iterdir()] == [file]:
            (folder.path / file).unlink()
            folder.path.rmdir()


def show_runs(
    title: str,
    kind: str,
    runs: Mapping[str, Mapping[str, Any]],
    names: Sequence[str],
    spreads: Mapping[str, Mapping[str, Any]],
) -> None:
    """Print the results `names` of each run, then their means and standard deviations.

    kind: title of the first column. spreads: `stats.mean_interval` of results.
    """
    table = Table(kind, title=title, title_justify="left", title_style="")
    for name in names:
        table.add_column(TITLES.get(name, name.replace("_", " ")), justify="right")
    for run, values in runs.items():
        table.add_row(run, *(_cell(values.get(name)) for name in names))
    for statistic in ("mean", "std"):
        table.add_row(statistic, *(_cell(spreads.get(name, {}).get(statistic)) for name in names))
    for_tables().print(table)


def _cell(value: float | None) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4f}"
    return str(value)


def find_run(logs: Path | None, settings: Mapping[str, Any]) -> Path | None:
    """Return a finished run with these settings, else one that can be resumed, or None."""
    if logs is None:
        return None
    resumable = None
    for config in logs.glob("*/config.yaml"):
        run = config.parent
        if not settings.items() <= read_run(run).settings.items():
            continue
        if is_finished(run, needs_test=True):
            return run
        if resumable is None and newest_checkpoint(run).is_file():
            resumable = run
    return resumable


def train_in_processes(words: Sequence[str]) -> None:
    """Run `train` with these arguments in a process group of its own, which gets the stop signals of this process.

    Raise Interrupted if a signal stopped it, or SystemExit with its exit code if it failed and printed the reason.
    """
    command = [sys.executable, "-m", "cifar_lit", "train", *words]
    with started(command, stdout=subprocess.DEVNULL) as process:
        for number in stop_signals():
            signal.signal(number, lambda number, frame: ask_to_stop(process, number))
        code = process.wait()
    catch_signals()
    if code < 0:
        code = 128 - code
    if code - 128 in STOP_SIGNALS:
        raise Interrupted(code - 128)
    if code:
        raise SystemExit(code)
