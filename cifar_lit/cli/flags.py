"""Read from a command line what must be known before its parser: recipe, files, folder and launcher.

This module does not import torch, so that an invalid command line fails at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

from cifar_lit.base.errors import UsageError, nearest
from cifar_lit.data.settings import Images, Loading
from cifar_lit.features import FEATURES


class Flag(NamedTuple):
    """A short flag with the text of its help."""

    name: str  # without dashes
    value: str
    text: str
    setting: str = ""  # the setting that it sets, if this has another name


# All short flags by group. Both helps and the parser have their texts from here.
GROUPS = {
    "settings": (
        Flag("recipe", "NAME", "packaged recipe, or a YAML file of your own"),
        Flag("config", "FILE", "YAML file with more settings; may be repeated"),
        Flag("seed", "N", "seed of all random numbers", "seed_everything"),
        Flag("trust", "", "let the settings found beside a run name any class"),
    ),
    "data": (
        Flag("dataset", "NAME", "cifar10, cifar100, fashion_mnist, folder or shapes", "data.dataset"),
        Flag("data-dir", "PATH", "your own images, or the folder for downloads", "data.root"),
        Flag("batch-size", "N", "images of a step, over all devices", "data.batch_size"),
    ),
    "training": (
        Flag("net", "NAME", "such as resnet18, timm/NAME, my_nets.MyNet", "model.net"),
        Flag("weights", "FILE", "start from a file, a run, or imagenet", "finetune.weights"),
        Flag("lr", "X", "highest learning rate", "model.lr"),
        Flag("epochs", "N", "length of the training", "trainer.max_epochs"),
        Flag("resume", "[PATH]", "resume the newest unfinished run, or this one"),
        Flag("checkpoint-every", "N", "also within epochs: 500 (steps) or 10m", "checkpoint_every"),
        Flag("seeds", "0-4", "with train: one training per seed"),
        Flag("folds", "5", "with train: cross-validation"),
    ),
    "machine": (
        Flag("devices", "N", "a number, ids such as 0,1, or auto", "trainer.devices"),
        Flag("accelerator", "NAME", "cpu, gpu or mps", "trainer.accelerator"),
        Flag("precision", "P", "such as 32-true or bf16-mixed", "trainer.precision"),
        Flag("threads", "N", "CPU threads of each process (default: the free ones)"),
        Flag("nodes", "N", "number of machines", "trainer.num_nodes"),
        Flag("rank-timeout", "S", "seconds that a process may keep others waiting (DDP)", "rank_timeout"),
    ),
    "output": (
        Flag("logs", "DIR", "folder for run folders (lightning_logs)"),
        Flag("logger", "LIST", "tensorboard, csv, wandb, mlflow, with commas between"),
        Flag("print_config", "", "print all settings as YAML"),
        Flag("debug", "", "show tracebacks"),
        Flag("help-all", "", "list every Trainer, model and data setting"),
    ),
}
CHECKPOINT = Flag("ckpt_path", "PATH", "the net to score, such as RUN/checkpoints/best.ckpt")
FLAGS = {flag.name: flag for group in GROUPS.values() for flag in group}
# Settings by short flag.
SHORT = {}
for flag in FLAGS.values():
    if flag.setting:
        SHORT[flag.name] = flag.setting
for group, kind in (("images", Images), ("loading", Loading)):
    for setting in fields(kind):
        SHORT[f"data.{setting.name}"] = f"data.{group}.{setting.name}"
# Flags for several trainings by one command, with the function for each.
SEVERAL = {"folds": "cifar_lit.cli.folds:train_folds", "seeds": "cifar_lit.cli.seeds:train_seeds"}
# Read here. The parser of the settings does not know them.
SWITCHES = ("trust", "debug")  # handled by `main`
OWN = ("recipe", "config", "logs", "resume", "trust", *SEVERAL, "debug", "help-all")
TRAINING = ("fit", "train", "validate", "test", "predict")
LOGS = "lightning_logs"
SWITCH = {"": "{}", "true": "{}", "false": "null"}  # values that turn a feature on and off
DEFAULT_RECIPES = {"gpu": "fast94", "bf16": "cpu91", "cpu": "cpu91"}  # bf16: CPUs with bfloat16 instructions
RECIPES = Path(__file__).parent.parent / "recipes"


@dataclass
class Command:
    """A training command with its arguments."""

    name: str  # one of TRAINING
    recipe: str | None = None  # a packaged recipe, or the path of a YAML file
    configs: list[str] = field(default_factory=list)  # further YAML files; later ones take precedence
    logs: str | None = None
    resume: str | None = None  # "" for the newest run, a path, or None to start a new run
    flags: list[str] = field(default_factory=list)  # all others, each with its value, such as `--lr=0.1`
    # Flags for several trainings with their values as typed.
    several: dict[str, str] = field(default_factory=dict)
    is_part: bool = False  # one of several trainings, whose results are not printed
    brief: bool = False  # print no start card
    job: str | None = None  # record of the scheduler's job, stored in the folder of a new run
    # The arguments as typed, without those for several trainings.
    words: list[str] = field(default_factory=list, compare=False)

    @property
    def trains(self) -> bool:
        """Return whether the command trains a net."""
        return self.name in ("fit", "train")

    @property
    def stage(self) -> str:
        """Return the method of the Trainer: fit, validate, test or predict."""
        return "fit" if self.trains else self.name

    @property
    def asks_only(self) -> bool:
        """Return whether the command only prints help or a configuration."""
        return any(word.startswith(("--help", "--print_")) for word in self.flags)

    def value(self, setting: str) -> str | None:
        """Return the last value of a setting among the flags; None if it is not given."""
        for word in reversed(self.flags):
            flag, _, value = word.removeprefix("--").partition("=")
            if flag == setting:
                return value
        return None


def flag_lines(command: str) -> list[str]:
    """Return the lines of help for the short flags of a training command."""
    groups = dict(GROUPS)
    if command in ("validate", "test", "predict"):
        groups["training"] = (CHECKPOINT,)
    lines = []
    for title, group in groups.items():
        lines += ["", title]
        for flag in group:
            words = f"--{flag.name} {flag.value}"
            lines.append(f"  {words:<22} {flag.text}")
    return lines


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

    Raise UsageError if an argument is unexpected, or a --config file does not exist.
    """
    command = Command(name)
    for word in with_values(argv):
        flag, equals, value = word.partition("=")
        key = flag.removeprefix("--")
        if flag == "-c":
            key = "config"
        if key == "ckpt_path" and command.trains:
            key = "resume"
        if not equals and key in (*SEVERAL, *SHORT, "recipe", "config", "logs"):
            raise UsageError(f"{flag} needs a value")
        if key in ("recipe", "logs", "resume"):
            setattr(command, key, value)
        elif key == "config":
            command.configs.append(_config_file(value))
        elif key in SEVERAL:
            command.several[key] = value
        elif key == "help-all":
            command.flags.append("--help")
        elif key in FEATURES:
            command.flags.append(f"{flag}={SWITCH.get(value.lower(), value)}")
        elif key in SHORT:
            command.flags.append(f"--{SHORT[key]}={value}")
        elif key not in SWITCHES:
            command.flags.append(word)
        if key not in SEVERAL:
            command.words.append(word)
    return command


def with_values(argv: Sequence[str]) -> list[str]:
    """Return the flags of a command line, each with its value: `--lr 1` becomes `--lr=1`."""
    words: list[str] = []
    is_open = False  # whether the latest flag may take a value
    for number, word in enumerate(argv):
        if _is_flag(word):
            words.append(word)
            is_open = "=" not in word and word.removeprefix("--") not in SWITCHES
        elif is_open:
            words[-1] += f"={word}"
            is_open = False
        else:
            raise UsageError(f"unexpected argument {word!r}.{_stray_word_hint(word, argv[:number])}")
    return words


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
