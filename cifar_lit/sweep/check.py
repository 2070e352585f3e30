"""Check the settings of a sweep before its first trial, with the messages of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jsonargparse import ArgumentError

from cifar_lit import hardware
from cifar_lit.cli import flags
from cifar_lit.cli.errors import explain_parser_error, long_flags
from cifar_lit.cli.fit import TrainingCLI, check_settings
from cifar_lit.errors import UsageError, check_choice
from cifar_lit.runs.config_file import check_choices
from cifar_lit.sweep.space import SweepFile
from cifar_lit.training.metrics import TOP, value_names

FIGURES = ("train_seconds", "images_per_second", "parameters")  # objectives that have no curve


class CheckedSettings(TrainingCLI):
    """Settings of all trials, checked without data, net and Trainer."""

    def check(self, values: Mapping[str, Any]) -> Any:
        """Return all settings with those of a file, by dotted name; raise UsageError if they are invalid."""
        parser = self._subcommand_parsers["fit"]
        try:
            settings = parser.parse_object(nested(values, {}), self.settings)
        except ArgumentError as error:
            raise UsageError(explain_parser_error(str(error), long_flags(parser))) from error
        check_choices(settings.as_dict())
        check_settings(settings)
        return settings

    def before_instantiate_classes(self) -> None:
        """Check the settings and the devices."""
        check_settings(self.settings)
        trainer = self.settings.trainer
        hardware.choose_devices(hardware.detect_machine(), trainer.accelerator, trainer.devices)

    def instantiate_classes(self) -> None:
        """Build nothing."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing."""


def check_sweep(file: SweepFile, words: list[str]) -> Any:
    """Return the settings of the first trial without those that are searched; raise UsageError for invalid ones.

    words: flags of all trials.
    """
    typed = flags.parse("fit", words)
    if typed.recipe or typed.configs or typed.several or typed.resume is not None:
        raise UsageError(
            "sweep takes its recipe from the file and starts `fit`: leave the flags of other trainings out"
        )
    for parameter in file.parameters:
        if typed.value(parameter.name) is not None:
            raise UsageError(f"--{parameter.name} is searched: leave the flag out")
    checked = CheckedSettings(flags.parse("fit", ["--recipe", file.recipe, *words]))
    base = checked.check(file.settings)
    for values in file.corners():
        checked.check({**file.settings, **values})
    metrics = [f"val/{name}" for name in value_names(TOP + 1, base.model.metrics or {})]
    for objective in file.objectives:
        check_choice("objective", objective, (*metrics, "train/loss", "train/accuracy", *FIGURES))
        if objective in FIGURES and file.pruner != "none":
            raise UsageError(f"{objective} has no learning curve: use pruner: none")
    return base


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
