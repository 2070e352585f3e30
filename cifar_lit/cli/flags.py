"""Translate the typed command line for LightningCLI: recipe first, then --config files, then flags.

This module does not import torch, so that an invalid command line fails at once.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cifar_lit.base.config_file import plain_values
from cifar_lit.base.errors import UsageError, nearest
from cifar_lit.features import FEATURES

# Short flags, and LightningCLI's long flags.
SHORT = {
    "devices": "trainer.devices",
    "accelerator": "trainer.accelerator",
    "nodes": "trainer.num_nodes",
    "precision": "trainer.precision",
    "epochs": "trainer.max_epochs",
    "dataset": "data.dataset",
    "data-dir": "data.root",
    "batch-size": "data.batch_size",
    "data.image_size": "data.images.image_size",
    "data.resize": "data.images.resize",
    "data.channels": "data.images.channels",
    "data.levels": "data.images.levels",
    "data.skip_bad": "data.images.skip_bad",
    "data.labels": "data.images.labels",
    "data.groups": "data.images.groups",
    "data.mean": "data.images.mean",
    "data.std": "data.images.std",
    "data.count": "data.images.count",
    "data.num_classes": "data.images.num_classes",
    "data.placement": "data.loading.placement",
    "data.workers": "data.loading.workers",
    "data.eval_batch_size": "data.loading.eval_batch_size",
    "data.cache_dir": "data.loading.cache_dir",
    "data.url": "data.loading.url",
    "net": "model.net",
    "weights": "finetune.weights",
    "lr": "model.lr",
    "seed": "seed_everything",
    "checkpoint-every": "checkpoint_every",
    "rank-timeout": "rank_timeout",
}
# Flags for several trainings by one command, with the function for each.
SEVERAL = {"folds": "cifar_lit.cli.folds:train_folds", "seeds": "cifar_lit.cli.seeds:train_seeds"}
# Not for LightningCLI.
OWN = ("recipe", "config", "logs", "resume", "trust", *SEVERAL, "json", "debug")
TRAINING = ("fit", "train", "validate", "test", "predict")
LOGS = "lightning_logs"
SWITCH = {"": "{}", "true": "{}", "false": "null"}  # values that turn a feature on and off
DEFAULT_RECIPES = {"gpu": "fast94", "bf16": "cpu91", "cpu": "cpu91"}  # bf16: CPUs with bfloat16 instructions
RECIPES = Path(__file__).parent.parent / "recipes"
NO_PATH = "#" * 256  # longer than a file name: the parser would read a file that is called like a configuration


@dataclass
class Command:
    """A training command with its arguments."""

    name: str  # one of TRAINING
    recipe: str | None = None  # a packaged recipe, or the path of a YAML file
    configs: list[str] = field(default_factory=list)  # further YAML files; later ones take precedence
    logs: str | None = None
    resume: str | None = None  # "" for the newest run, a path, or None to start a new run
    flags: list[str] = field(default_factory=list)  # all others in LightningCLI's form, such as `--model.lr=0.1`
    # Flags for several trainings with their values as typed.
    several: dict[str, str] = field(default_factory=dict)
    json: str | None = None  # file for the results, times and memory of several seeds
    brief: bool = False  # print neither start card, epochs nor results
    job: str | None = None  # record of the scheduler's job, stored in the folder of a new run
    # The arguments as typed, without those for several trainings and --json.
    words: list[str] = field(default_factory=list, compare=False)

    @property
    def asks_only(self) -> bool:
        """Return whether the command only prints help or a configuration."""
        return any(word.startswith(("-h", "--help", "--print_")) for word in self.flags)

    def value(self, flag: str) -> str | None:
        """Return the last value of a long flag; None if it is not given."""
        for word in reversed(self.flags):
            if word.startswith(f"--{flag}="):
                return word.partition("=")[2]
        return None


def machine_kind(accelerator: str | None = None) -> str:
    """Return the kind of this machine, a key of `DEFAULT_RECIPES`. accelerator: "cpu" ignores the GPUs."""
    from cifar_lit.base.hardware import detect_machine  # imports torch

    machine = detect_machine()
    if machine.gpus and accelerator != "cpu":
        return "gpu"
    return "bf16" if machine.bf16 else "cpu"


def recipe_names() -> list[str]:
    """Return the names of the packaged recipes in alphabetical order."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def recipe_path(name: str) -> Path:
    """Return the YAML file of a packaged recipe, or `name` as a path; raise UsageError if there is none."""
    if not name.endswith((".yaml", ".yml")):
        return packaged_recipe(name)
    path = Path(name).expanduser()
    if not path.is_file():
        raise UsageError(f"there is no recipe file {name}.{nearest(path.stem, recipe_names())}")
    return path


def packaged_recipe(name: str) -> Path:
    """Return the YAML file of a packaged recipe; raise UsageError if there is none of this name."""
    names = recipe_names()
    if name not in names:
        raise UsageError(f"no recipe is called {name!r}.{nearest(name, names)} There are {', '.join(names)}.")
    return RECIPES / f"{name}.yaml"


def parse(name: str, argv: list[str]) -> Command:
    """Parse the arguments of the training command `name`. Of a repeated flag except --config, the last value counts.

    Raise UsageError if a flag lacks its value, an argument is unexpected, or a --config file does not exist.
    """
    command = Command(name)
    remaining = deque(argv)
    while remaining:
        begin = len(argv) - len(remaining)
        word = remaining.popleft()
        if not _is_flag(word):
            raise UsageError(f"unexpected argument {word!r}.{_stray_word_hint(word, argv[:begin])}")
        if word in ("--trust", "--debug"):  # handled by `main`
            command.words.append(word)
            continue
        flag, equals, value = word.partition("=")
        key = flag.removeprefix("--")
        if flag == "-c":
            key = "config"
        has_value = bool(equals)
        if not equals and remaining and not _is_flag(remaining[0]):
            value = remaining.popleft()
            has_value = True
        if not has_value and key in (*SHORT, *SEVERAL, "recipe", "config", "logs", "json"):
            raise UsageError(f"{flag} needs a value")
        if key == "ckpt_path" and name in ("fit", "train"):
            key = "resume"
        if key == "resume":
            command.resume = value
        elif key in SHORT:
            command.flags.append(f"--{SHORT[key]}={value}")
        elif key in SEVERAL:
            command.several[key] = value
        elif key == "config":
            command.configs.append(_config_file(value))
        elif key in ("recipe", "logs", "json"):
            setattr(command, key, value)
        elif key in FEATURES:
            command.flags.append(f"{flag}={SWITCH.get(value.lower(), value)}")
        elif has_value:
            command.flags.append(f"{flag}={value}")
        else:
            command.flags.append(word)
        if key not in (*SEVERAL, "json"):
            command.words += argv[begin : len(argv) - len(remaining)]
    if command.json is not None and "seeds" not in command.several:
        raise UsageError("--json records several seeds: add --seeds 0-4. The run folder of one has a metrics.json")
    return command


def _config_file(name: str) -> str:
    """Return `name`; raise UsageError if it is not a file."""
    if not Path(name).expanduser().is_file():
        raise UsageError(f"there is no configuration file {name}: check the path, or use --recipe for a packaged one")
    return name


def _stray_word_hint(word: str, before: Sequence[str]) -> str:
    """Return the remedy for an unexpected argument, as a sentence. before: the arguments before it."""
    if word in recipe_names():
        return f" Did you mean --recipe {word}?"
    if word.endswith((".yaml", ".yml")):
        return f" Did you mean --config {word}?"
    if before and not _is_flag(before[-1]):  # in Windows' shell, 'single quotes' do not hold a path together
        return f' Put a value with spaces into double quotes: "{before[-1]} {word}"'
    return " Flags begin with --, see --help."


def _is_flag(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return word.startswith("-")
    return False


def arguments(command: Command, base: Path | None, subcommand: str) -> list[str]:
    """Return LightningCLI's command line: subcommand, base, --config files, flags.

    base: YAML file of the settings with the lowest precedence (of a recipe or a run), or None.
    """
    line = [subcommand]
    files = [recipe_settings(Path(config).expanduser()) for config in command.configs]
    if base:
        files.insert(0, recipe_settings(base))
    drop_replaced_options(files, {part: command.value(f"model.{part}") for part in PARTS})
    if base:
        line.append(_as_text(files.pop(0)))
        if not command.recipe:
            line.append(f"--logs={LOGS}")  # overrides the folder recorded in the run's configuration
    line += map(_as_text, files)
    if command.recipe:
        line.append(f"--recipe={recipe_path(command.recipe).stem}")
    for word in command.flags:
        if word == "--data.augment=null":  # the parser has no null for a group
            word = f"--data.augment={json.dumps(_all_off())}"
        line.append(word)
    if command.logs:
        line.append(f"--logs={command.logs}")
    return line


# Parts of a model that have options of their own, with their defaults.
PARTS = {"net": "resnet18", "optimizer": "sgd", "schedule": "constant"}


def drop_replaced_options(files: Sequence[dict[str, Any]], typed: Mapping[str, str | None]) -> None:
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


def _as_text(settings: Mapping[str, object]) -> str:
    """Return --config with settings, so that the parser does not read the file with another reader."""
    values = yaml.safe_dump(dict(settings), default_flow_style=True, width=sys.maxsize)
    return f"--config={NO_PATH}\n{values}"


def recipe_settings(path: Path) -> dict[str, Any]:
    """Return the settings of a file as nested plain values.

    `data.augment: null` becomes settings that are off, a feature that is true {}, and one that is false null.
    """
    settings: dict[str, object] = plain_values(path)
    for name in FEATURES:
        if isinstance(settings.get(name), bool):
            settings[name] = {} if settings[name] else None
    data = settings.get("data")
    if isinstance(data, dict) and data.get("augment", {}) is None:
        data["augment"] = _all_off()
    return settings


def _all_off() -> dict[str, object]:
    from cifar_lit.data.augment import Augment  # imports torch

    return asdict(Augment())
