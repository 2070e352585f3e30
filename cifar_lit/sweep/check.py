"""Check the settings of a sweep before its first trial, with the messages of the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from cifar_lit import hardware
from cifar_lit.cli import flags, trust
from cifar_lit.cli.errors import UNTRUSTED
from cifar_lit.cli.fit import TrainingCLI, check_settings
from cifar_lit.errors import UsageError, check_choice
from cifar_lit.runs.config_file import check_choices
from cifar_lit.sweep.space import SweepFile
from cifar_lit.training.metrics import TOP, value_names

FIGURES = ("train_seconds", "images_per_second", "parameters")  # objectives that have no curve


class CheckedSettings(TrainingCLI):
    """Settings of a training, checked without data, net and Trainer."""

    def before_instantiate_classes(self) -> None:
        """Check the settings and the devices."""
        check_settings(self.settings)
        trainer = self.settings.trainer
        hardware.choose_devices(hardware.detect_machine(), trainer.accelerator, trainer.devices)

    def instantiate_classes(self) -> None:
        """Build nothing."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing."""


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Return settings by dotted name as flags."""
    return [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in settings.items()]


def check_sweep(file: SweepFile, fixed: Sequence[str], words: Sequence[str], trusted: bool) -> Any:
    """Return the settings of the starting recipe; raise UsageError if a value of the search space is invalid.

    Args:
        fixed: arguments of all trials.
        words: those of them that the user typed.
    """
    typed = flags.parse("fit", [*words])
    others = typed.several or typed.resume is not None
    if typed.recipe or typed.configs or others:
        raise UsageError(
            "sweep takes its recipe from the file and starts `fit`: leave the flags of other trainings out"
        )
    if twice := [parameter.name for parameter in file.parameters if typed.value(parameter.name) is not None]:
        raise UsageError(f"--{twice[0]} is searched: leave the flag out")
    base = None
    for values in ({}, *file.corners()):
        if not trusted:
            _check_trusted(nested({**file.settings, **values}, {}))
        settings = CheckedSettings(flags.parse("fit", [*fixed, *as_flags(values)])).settings
        base = base or settings
    metrics = [f"val/{name}" for name in value_names(TOP + 1, settings.model.metrics or {})]
    for objective in file.objectives:
        check_choice("objective", objective, (*metrics, "train/loss", "train/accuracy", *FIGURES))
        if objective in FIGURES and file.pruner != "none":
            raise UsageError(f"{objective} has no learning curve: use pruner: none")
    return base


def _check_trusted(settings: dict[str, Any]) -> None:
    """Raise UsageError for classes and paths that a configuration file must not choose: trials get them as flags."""
    with TemporaryDirectory() as folder:
        copy = Path(folder) / "settings.yaml"
        copy.write_text(yaml.safe_dump(settings))
        trust.guard(flags.Command("fit", configs=[str(copy)]), None)
    if paths := [path for _, path in trust.class_names(settings)]:
        raise UsageError(UNTRUSTED.format(paths[0]))
    check_choices(settings)


def nested(settings: Mapping[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with settings by dotted name."""
    for name, value in settings.items():
        *groups, last = name.split(".")
        target = base
        for group in groups:
            if not isinstance(target.get(group), dict):
                target[group] = {}
            target = target[group]
        target[last] = value
    return base


def devices_of_workers(workers: str, settings: Any) -> list[list[str]]:
    """Return further flags for each worker. workers: a number, or ids of GPUs, as typed."""
    machine = hardware.detect_machine()
    accelerator = settings.trainer.accelerator
    try:
        _, chosen = hardware.choose_devices(machine, accelerator, workers)
    except UsageError as error:
        raise UsageError(str(error).replace("--devices", "--workers")) from None
    count = hardware.count_devices(machine, accelerator, chosen)
    if not isinstance(chosen, list) and (count == 1 or not machine.gpus or accelerator == "cpu"):
        return [[]] * count
    if settings.trainer.devices != "auto":
        raise UsageError(f"--workers {workers} gives each worker one GPU: leave --devices out")
    ids = chosen if isinstance(chosen, list) else range(count)
    return [[f"--trainer.devices=[{device}]"] for device in ids]
