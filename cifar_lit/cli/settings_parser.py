"""The parser of fit, train, validate, test and predict: LightningCLI's settings, ours, and short flags."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from jsonargparse import ActionConfigFile, Namespace
from jsonargparse.typing import PositiveFloat, PositiveInt
from lightning.pytorch.cli import LightningArgumentParser

from cifar_lit.base.command_line import PARSER_SETTINGS, SYNONYMS, parsed
from cifar_lit.base.files import display_path
from cifar_lit.base.settings import plain_values
from cifar_lit.base.trust import check_found, limit_parser
from cifar_lit.cli.flags import DEFAULT_RECIPES, FLAGS, LOGS, OWN, SHORT, Command, machine_kind, recipe_path
from cifar_lit.data.augment import Augment
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.sources import check_used
from cifar_lit.features import FEATURES, feature_class, feature_settings
from cifar_lit.run.resume import run_of
from cifar_lit.training.classifier import ImageClassifier

TRAINER_DEFAULTS: dict[str, object] = {
    "max_epochs": 10,
    "num_sanity_val_steps": 0,  # a fit validates after its first epoch anyway
    "enable_model_summary": False,  # replaced by the start card
    "enable_progress_bar": False,  # a line is printed after each epoch
    "use_distributed_sampler": False,  # it would repeat images; our loaders split batches exactly
    "precision": None,
}

# Settings of the program with types and defaults. Their texts are those of the short flags.
OWN_SETTINGS: dict[str, tuple[Any, object]] = {
    "recipe": (str | None, None),
    "logs": (str, LOGS),
    "checkpoint_every": (int | str | None, None),
    "logger": (str, "tensorboard"),
    "threads": (PositiveInt | None, None),
    "rank_timeout": (PositiveFloat, 600.0),
}

OBJECTS = {"model", "datamodule", "dataloaders", "train_dataloaders", "val_dataloaders"}  # arguments of Trainer.fit
NO_AUGMENT = asdict(Augment())
# Parts of a model that have options of their own, with their defaults.
PARTS = {"net": "resnet18", "optimizer": "sgd", "schedule": "constant"}


def settings_parser(name: str) -> LightningArgumentParser:
    """Return the parser of a method of the Trainer: fit, validate, test or predict."""
    header = [f"lightning.pytorch=={pl.__version__}"]
    parser = LightningArgumentParser(prog=f"cifar-lit {name}", dump_header=header, **PARSER_SETTINGS)
    add = parser.add_argument
    add("-c", "--config", action=ActionConfigFile, help=FLAGS["config"].text)
    add("--seed_everything", type=bool | int, default=0, help=f"{FLAGS['seed'].text}; true draws one")
    # Without sub_configs, which LightningCLI has: a file called `auto` would be read in place of the word.
    settings: dict[str, Any] = {"fail_untyped": False, "instantiate": False}
    parser.add_class_arguments(pl.Trainer, "trainer", **settings)
    parser.set_defaults({f"trainer.{setting}": value for setting, value in TRAINER_DEFAULTS.items()})
    # The shape of the model comes from the data, and the seed of the data from --seed.
    parser.add_class_arguments(ImageClassifier, "model", skip={"input_shape", "num_classes"}, **settings)
    parser.add_class_arguments(ImageData, "data", skip={"seed"}, **settings)
    for feature in FEATURES:
        kind = feature_class(feature)
        flags = ", ".join(f"--{setting}" for setting in feature_settings(feature))
        text = f"{kind.__doc__.splitlines()[0]} Settings: {flags or 'none'}."
        add(f"--{feature}", type=kind | None, default=None, help=text)
    for setting, (types, default) in OWN_SETTINGS.items():
        add(f"--{setting}", type=types, default=default, help=FLAGS[setting.replace("_", "-")].text)
    parser.add_method_arguments(pl.Trainer, name, skip=OBJECTS)
    return parser


def parse_settings(command: Command, resumed: Path | None) -> tuple[LightningArgumentParser, Namespace]:
    """Return the parser and the settings of recipe or run, --config files and flags, in order of rising precedence.

    resumed: checkpoint of the run to resume.
    """
    found = run_with_settings(command, resumed)
    if found:
        limit_parser()
    paths = [Path(config).expanduser() for config in command.configs]
    base = recipe_file(command, found)
    if base:
        paths.insert(0, base)
    files = [file_settings(path) for path in paths]
    if found:
        files[0]["logs"] = LOGS
    drop_replaced_options(files, {part: command.value(f"model.{part}") for part in PARTS})
    own = {}
    if command.recipe:
        own["recipe"] = recipe_path(command.recipe).stem
    if command.logs:
        own["logs"] = command.logs
    # The parser has no null for a group.
    flags = [word.replace("--data.augment=null", f"--data.augment={json.dumps(NO_AUGMENT)}") for word in command.flags]
    further = [*OWN, *SYNONYMS.values()]
    for feature in FEATURES:
        further += feature_settings(feature)
    parser = settings_parser(command.stage)
    named = [*zip(map(display_path, paths), files, strict=True), ("", own)]
    settings = parsed(parser, flags, further, SHORT, named)
    for flag in command.flags:
        if not flag.endswith("=null"):
            check_used(settings.data.dataset, flag.partition("=")[0].removeprefix("--data."))
    if found:
        check_found(settings.as_dict(), found.parent, command.flags)
    return parser, settings


def run_with_settings(command: Command, resumed: Path | None) -> Path | None:
    """Return the run whose settings apply: the one to resume, or that of the checkpoint to score; None for a recipe."""
    if resumed:
        return run_of(resumed)
    scored = command.value("ckpt_path")
    if scored and not command.recipe and not command.configs:
        return run_of(Path(scored).expanduser())
    return None


def recipe_file(command: Command, found: Path | None) -> Path | None:
    """Return the file of the settings with the lowest precedence: of a run, of the recipe or of the default recipe."""
    if found:
        return found / "config.yaml"
    if not command.recipe:
        if command.configs or command.asks_only:
            return None
        command.recipe = DEFAULT_RECIPES[machine_kind(command.value("trainer.accelerator"))]
    return recipe_path(command.recipe)


def drop_replaced_options(files: Sequence[Mapping[str, Any]], typed: Mapping[str, str | None]) -> None:
    """Remove the options of a net, optimizer or schedule that a later file, or a flag, replaces by another.

    files: settings, later ones take precedence; changed in place. typed: names of the parts that flags name.
    """
    for part, named in PARTS.items():
        models = []  # the model of each file, and the name of the part that its options are for
        for settings in files:
            model = settings.get("model") or {}
            named = model.get(part, named)
            models.append((model, named))
        last = typed.get(part) or named
        for model, name in models:
            if name != last:
                model.pop(f"{part}_options", None)


def file_settings(path: Path) -> dict[str, Any]:
    """Return the settings of a file as nested plain values.

    `data.augment: null` becomes settings that are off, a feature that is true {}, and one that is false null.
    """
    settings: dict[str, object] = plain_values(path)
    for name in FEATURES:
        if isinstance(settings.get(name), bool):
            settings[name] = {} if settings[name] else None
    data = settings.get("data")
    if isinstance(data, dict) and data.get("augment", {}) is None:
        data["augment"] = NO_AUGMENT
    return settings
