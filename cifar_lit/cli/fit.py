"""fit, train, validate, test and predict, from top to bottom: parse, settle, build, train, print."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy

from cifar_lit.base import hardware
from cifar_lit.base.command_line import instantiated
from cifar_lit.base.errors import UsageError
from cifar_lit.base.files import display_path
from cifar_lit.base.plugins import part_name
from cifar_lit.base.settings import without_passwords
from cifar_lit.base.text import note, note_once, quoted
from cifar_lit.base.threads import choose_threads
from cifar_lit.base.trust import untrusted_parts
from cifar_lit.cli.flags import Command
from cifar_lit.cli.launch import by_slurm, is_first_process, logs_of
from cifar_lit.cli.ranks import ChildRanks
from cifar_lit.cli.run_report import StartCard, print_result
from cifar_lit.cli.settings_parser import parse_settings
from cifar_lit.data.datamodule import ImageData
from cifar_lit.features import FEATURES, feature_class
from cifar_lit.models.registry import check_net
from cifar_lit.run.folder import RunFolder
from cifar_lit.run.resume import check_unfinished, find_resumable, run_of
from cifar_lit.run.run import Run
from cifar_lit.train import Results, evaluate, fit, predict
from cifar_lit.training.checkpoint import (
    AtomicCheckpointIO,
    latest_valid_checkpoint,
    load_weights,
    read_checkpoint,
    regular_checkpoint,
)
from cifar_lit.training.classifier import TRAINER_SETTINGS, ImageClassifier, check_model
from cifar_lit.training.orderly_stop import Interrupted

RESUMED_CHECKPOINT = "CIFAR_LIT_RESUME"  # environment variable: the checkpoint that the first process has selected


@dataclass(frozen=True)
class Training:
    """The objects of a command that has run."""

    run: Run
    model: ImageClassifier
    data: ImageData


def run_command(command: Command) -> Training:
    """Run fit, train, validate, test or predict, and print its results."""
    first = is_first_process(os.environ)
    resumed = resumed_checkpoint(command, first)
    parser, settings = parse_settings(command, resumed)
    seed_everything(settings)
    ranks, notes = settle(command, settings)
    with ExitStack() as at_end:
        at_end.callback(leave_process_group)
        logs, name = Path(settings.logs).expanduser(), settings.recipe or "custom"
        folder = RunFolder(logs, name, run_of(resumed) if resumed else None, first, command.job)
        at_end.callback(folder.release)
        at_end.enter_context(naming_the_command_to_resume(command, settings, folder))
        start, contents = starting_checkpoint(command, settings, resumed, first)

        if resumed and start:
            notes |= {"resume": display_path(start), "step": str(contents["global_step"])}

        parts = instantiated(parser, settings)
        data, model = build_data_and_model(parts, settings, contents, resumes=resumed is not None)
        settings.data.images.mean, settings.data.images.std = data.statistics
        typed_config = parser.dump(settings, skip_none=False)
        config = without_passwords(typed_config)
        if config != typed_config:
            note_once("passwords in URLs are not stored: type --data.url again to repeat this run from its config.yaml")
        run = Run(folder, yaml.safe_load(config), config, notes, command.name, model.monitored)
        children = ChildRanks()
        callbacks = [children, *as_list(parts.trainer.callbacks), *run_callbacks(command, run, data, parts)]
        trainer = build_trainer(parts, run, data, callbacks, ranks)
        at_end.callback(children.end, trainer)

        result: Results | int | None
        if command.trains:
            result = fit(run, trainer, model, data, start or settings.ckpt_path)
        else:
            load_weights(model, settings.ckpt_path, contents)
            run.folder.test_weights(settings.ckpt_path, contents)
            work = predict if command.name == "predict" else evaluate
            result = work(run, trainer, model, data)
        if trainer.is_global_zero and not command.is_part:
            print_result(result, run, data)
    return Training(run, model, data)


# ---- resume


def resumed_checkpoint(command: Command, first: bool) -> Path | None:
    """Return the checkpoint to resume, the same in every process of the run. It is not read yet."""
    if command.resume is None:
        return None
    if not command.trains:
        raise UsageError(f"--resume is for trainings; `{command.name}` takes --ckpt_path PATH")
    if not first and RESUMED_CHECKPOINT in os.environ:
        checkpoint = Path(os.environ[RESUMED_CHECKPOINT])
    else:
        needs_test = command.name == "train"
        checkpoint = find_resumable(logs_of(command), command.resume, needs_test, first)
    if run_of(checkpoint) is None:
        raise UsageError(f"{checkpoint} is not in a run folder: give --resume a run, or a checkpoint of one")
    return checkpoint


def starting_checkpoint(
    command: Command, settings: Namespace, resumed: Path | None, first: bool
) -> tuple[Path | None, dict[str, Any]]:
    """Return the checkpoint to resume or to score with its contents; None and {} for a new training.

    If the checkpoint to resume is damaged and was not typed, return an older one. Call this while holding the run's
    lock: before that, another process may write checkpoints or finish the run.
    """
    if not command.trains:
        scored = Path(settings.ckpt_path).expanduser()
        return scored, read_checkpoint(scored)
    if resumed is None:
        return None, {}
    check_unfinished(resumed.resolve().parent.parent, needs_test=command.name == "train")
    is_typed = Path(str(command.resume)).expanduser().is_file()
    if is_typed or (not first and RESUMED_CHECKPOINT in os.environ):
        checkpoint, contents, damaged = resumed, read_checkpoint(resumed), None
    else:
        checkpoint, contents, damaged = latest_valid_checkpoint(resumed)
    if damaged and first:
        note(f"{damaged}: resuming {display_path(checkpoint)} of step {contents['global_step']}")
    os.environ[RESUMED_CHECKPOINT] = str(checkpoint)
    return checkpoint, contents


def program_settings(settings: Namespace) -> dict[str, object]:
    """Return the settings that model and data do not record themselves, by dotted name, as plain values.

    A feature is one setting, whatever it holds. A resumed run stays in its folder, whatever `logs` is.
    """
    values = settings.as_dict()
    named = {"model.metrics": values["model"]["metrics"]}
    for name, value in values.items():
        if name not in ("model", "data", "trainer", "logs", "config"):
            named[name] = value
    for name, value in values["trainer"].items():
        if name not in TRAINER_SETTINGS:
            named[f"trainer.{name}"] = value
    plain: dict[str, object] = json.loads(json.dumps(named, default=part_name))
    return plain


@contextmanager
def naming_the_command_to_resume(command: Command, settings: Namespace, folder: RunFolder) -> Iterator[None]:
    """Add the command that resumes the run to an error, as its attribute `resume`."""
    Interrupted.latest = None
    try:
        yield
    except BaseException as error:
        cause: Any = Interrupted.latest or error
        if folder.resumable:
            cause.resume = f"{program(command.name)} --resume {quoted(display_path(folder.path))}"
            if untrusted_parts(settings.as_dict(), folder.path.parent):
                cause.resume += " --trust"
        if cause is error:
            raise
        raise cause from None


def program(command: str) -> str:
    """Return the start of a command line that runs `command` like this process: a script, cifar-lit or `python -m`."""
    path = Path(sys.argv[0])
    if path.suffix == ".py" and path.name != "__main__.py":
        return f"python {quoted(sys.argv[0])}"
    if path.suffix:
        return f"python -m cifar_lit {command}"
    return f"{path.name} {command}"


# ---- settle


def seed_everything(settings: Namespace) -> None:
    """Seed all random numbers, as LightningCLI does, and record the seed."""
    seed = settings.seed_everything
    if seed is not False:
        settings.seed_everything = pl.seed_everything(None if seed is True else seed, workers=True, verbose=False)


def settle(command: Command, settings: Namespace) -> tuple[int, dict[str, str]]:
    """Choose devices, threads and precision, and check the settings, before images are loaded.

    Returns:
        Number of processes on all nodes, and the reasons for the choices by row of the start card.
    """
    if not command.trains and settings.ckpt_path is None:
        path = "lightning_logs/NAME/checkpoints/best.ckpt"
        raise UsageError(f"{command.name} needs a checkpoint, such as --ckpt_path {path}")
    machine = hardware.detect_machine()
    trainer = settings.trainer
    notes: dict[str, str] = {}
    devices = choose_devices(command, trainer, machine)
    ranks = devices * trainer.num_nodes
    typed = command.value("threads") is not None
    if command.trains or typed:
        processes = devices
        if hardware.core_count() <= int(os.environ.get("SLURM_CPUS_PER_TASK", "0")):
            processes = 1  # SLURM gives each process cores of its own
        settings.threads, notes["threads"] = choose_threads(settings.threads, typed, processes)
    if trainer.precision is None:
        trainer.precision, notes["precision"] = hardware.choose_precision(machine, trainer.accelerator)
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs that have it
    check_settings(settings, ranks)
    for name in FEATURES:
        if settings[name] is None:
            continue
        if adjust := getattr(feature_class(name), "adjust_settings", None):
            adjust(settings[name], settings)
    return ranks, notes


def choose_devices(command: Command, trainer: Namespace, machine: hardware.Machine) -> int:
    """Choose the devices, and return their number on this machine. Raise UsageError if there are no such devices."""
    trainer.devices = hardware.choose_devices(machine, trainer.accelerator, trainer.devices)
    if command.name == "predict" and trainer.devices == "auto":
        trainer.devices = 1
    devices = hardware.count_devices(machine, trainer.accelerator, trainer.devices)
    if command.name == "predict" and devices > 1:
        raise UsageError("predict runs on one device: leave --devices out, or give one")
    if trainer.num_nodes > 1 and "MASTER_ADDR" not in os.environ and not by_slurm(os.environ):
        names = "MASTER_ADDR, MASTER_PORT and NODE_RANK"
        raise UsageError(f"--nodes {trainer.num_nodes} needs {names} on each machine, or torchrun or SLURM")
    return devices


def check_settings(settings: Namespace, ranks: int) -> None:
    """Raise UsageError for settings that have the right types but are invalid, before data are loaded."""
    if settings.checkpoint_every is not None:
        regular_checkpoint(settings.checkpoint_every)
        if ranks > 1 and not str(settings.checkpoint_every).isdecimal():
            raise UsageError(f"--checkpoint-every {settings.checkpoint_every} needs one process: use a number of steps")
    if settings.recipe and Path(settings.recipe).name != settings.recipe:
        raise UsageError(f"recipe: {settings.recipe!r} must be the name of a folder, without /")
    strategy = str(settings.trainer.strategy)
    if re.search("fsdp|deepspeed|model_?parallel|_spawn|_fork|_notebook", strategy, re.IGNORECASE):
        raise UsageError(f"--trainer.strategy {strategy} is not supported: use --trainer.strategy ddp")
    if settings.trainer.max_epochs == 0:
        raise UsageError("--epochs must be at least 1, not 0")
    check_model(settings.model.as_dict())
    check_net(settings.model.net, settings.model.net_options or {})


# ---- build


def build_data_and_model(
    parts: Namespace, settings: Namespace, checkpoint: dict[str, Any], resumes: bool
) -> tuple[ImageData, ImageClassifier]:
    """Return data and model, with the split of the checkpoint to resume or to score.

    Raise UsageError, before images are loaded, for settings that must not change on resume.
    """
    data = ImageData(**parts.data, seed=int(settings.seed_everything))
    model = ImageClassifier(**parts.model)
    model.program = program_settings(settings)
    for name in FEATURES:
        if getattr(feature_class(name), "may_change", False):
            model.may_change.append(name)
    if resumes:
        model.changes_since(checkpoint, data)
        data.load_state_dict(checkpoint["ImageData"])
    else:
        data.evaluate_split_of(checkpoint.get("ImageData", {}))
    model.build_for(data)
    return data, model


def run_callbacks(command: Command, run: Run, data: ImageData, parts: Namespace) -> list[Callback]:
    """Return the callbacks of the run, with the start card and the features."""
    further: list[Callback] = []
    if run.trains:
        if not command.brief:
            further.append(StartCard(run))
        for name in FEATURES:
            if parts[name] is not None:
                further.append(parts[name])
    return run.callbacks(len(data.split[1]) > 0, further)


def build_trainer(parts: Namespace, run: Run, data: ImageData, callbacks: list[Callback], ranks: int) -> pl.Trainer:
    """Return the Trainer of the configured settings, with these callbacks and the loggers of the run."""
    given = parts.trainer
    loggers = [logger for logger in as_list(given.logger) if isinstance(logger, Logger)]
    if given.logger is not False:
        run.create_loggers()
    arguments = {
        **given,
        "callbacks": callbacks,
        "logger": loggers,
        "plugins": [*as_list(given.plugins), AtomicCheckpointIO()],
    }
    if not len(data.split[1]):
        arguments["limit_val_batches"] = 0
    if ranks > 1 and given.strategy in ("auto", "ddp"):
        arguments["strategy"] = DDPStrategy(timeout=timedelta(seconds=parts.rank_timeout))
    return pl.Trainer(**arguments)


def as_list(value: object) -> list[Any]:
    """Return a setting that may be one value, several or none as a new list."""
    if value is None:
        return []
    if isinstance(value, list):
        return list(value)
    return [value]


def leave_process_group() -> None:
    """Leave the process group of gloo, whose threads can abort the interpreter at exit."""
    if torch.distributed.is_initialized() and torch.distributed.get_backend() == "gloo":
        torch.distributed.destroy_process_group()
