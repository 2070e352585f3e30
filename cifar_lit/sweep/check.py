"""Check the settings of a sweep before its first trial, with the messages of the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from cifar_lit import hardware
from cifar_lit.cli import flags
from cifar_lit.cli.fit import TrainingCLI, check_settings
from cifar_lit.errors import UsageError, check_choice
from cifar_lit.files import write_text
from cifar_lit.sweep.space import SweepFile
from cifar_lit.training.metrics import TOP, value_names

SETTINGS = "settings.yaml"  # in the folder of each trial
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


def check_sweep(file: SweepFile, fixed: Sequence[str], words: Sequence[str]) -> Any:
    """Return the settings of the starting recipe; raise UsageError if a value of the search space is invalid.

    Args:
        fixed: flags of all trials.
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
    with TemporaryDirectory() as folder:
        for values in ({}, *file.corners()):
            config = write_settings(Path(folder) / SETTINGS, {**file.settings, **values})
            settings = CheckedSettings(flags.parse("fit", [*fixed, "--config", config])).settings
            base = base or settings
    metrics = [f"val/{name}" for name in value_names(TOP + 1, settings.model.metrics or {})]
    for objective in file.objectives:
        check_choice("objective", objective, (*metrics, "train/loss", "train/accuracy", *FIGURES))
        if objective in FIGURES and file.pruner != "none":
            raise UsageError(f"{objective} has no learning curve: use pruner: none")
    return base


def write_settings(file: Path, recipe: Mapping[str, Any]) -> str:
    """Write settings by dotted name as a configuration file; return its path.

    A training gets them as a file, because a file is not trusted and flags are.
    """
    write_text(file, yaml.safe_dump(nested(recipe, {})))
    return str(file)


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
