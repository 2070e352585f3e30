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

from cifar_lit.errors import UsageError, nearest
from cifar_lit.features import FEATURES
from cifar_lit.hardware import is_one_device
from cifar_lit.runs.config_file import plain_values

# Short flags: LightningCLI's long flag, and an example of a value for the error message.
_SHORT = {
    "devices": ("trainer.devices", "2"),
    "accelerator": ("trainer.accelerator", "gpu"),
    "nodes": ("trainer.num_nodes", "2"),
    "precision": ("trainer.precision", "bf16-mixed"),
    "epochs": ("trainer.max_epochs", "10"),
    "dataset": ("data.dataset", "folder"),
    "data-dir": ("data.root", "PATH"),
    "batch-size": ("data.batch_size", "128"),
    "net": ("model.net", "resnet18"),
    "weights": ("finetune.weights", "imagenet"),
    "lr": ("model.lr", "0.1"),
    "seed": ("seed_everything", "1"),
    "checkpoint-every": ("checkpoint_every", "10m"),
    "rank-timeout": ("rank_timeout", "600"),
    "threads": ("threads", "2"),
}
_EXAMPLES = {"recipe": "quickstart", "config": "my.yaml", "logs": "DIR", "folds": "5", "seeds": "0-4"} | {
    "json": "FILE",
    **{name: value for name, (_, value) in _SHORT.items()},
}
SHORT = {name: long for name, (long, _) in _SHORT.items()}
# Flags for several trainings by one command, with the function for each.
SEVERAL = {
    "folds": "cifar_lit.cli.folds:train_folds",
    "seeds": "cifar_lit.cli.seeds:train_seeds",
}
# Not for LightningCLI.
OWN = ("recipe", "config", "logs", "resume", "trust", *SEVERAL, "json", "debug")
# Flags and YAML keys of timm, Ultralytics, Keras and Lightning 1, in lower case with dashes, by our equivalent setting.
# The setting has a value if the flag implies one.
_SYNONYMS = {
    "trainer.accelerator": "device",
    "trainer.accelerator cpu": "cpu no-cuda",
    "trainer.accelerator gpu": "gpu cuda",
    "trainer.devices": "gpus num-gpus nproc-per-node world-size",
    "trainer.max_epochs": "e train-epochs num-train-epochs",
    "trainer.max_steps": "steps num-steps iterations",
    "trainer.precision 16-mixed": "amp fp16 half mixed-precision",
    "trainer.precision bf16-mixed": "bf16",
    "trainer.gradient_clip_val": "clip-grad grad-clip clipnorm max-grad-norm",
    "trainer.accumulate_grad_batches": "grad-accum-steps gradient-accumulation-steps",
    "data.root": "d data data-path dataset-dir image-dir input-dir",
    "data.batch_size": "b bs per-device-train-batch-size",
    "data.eval_batch_size": "test-batch-size val-batch-size",
    "data.workers": "j",
    "threads": "num-threads omp-num-threads",
    "data.val_size": "val-split validation-split val-ratio",
    "data.image_size": "img input-size resolution crop-size",
    "data.augment": "aug transforms",
    "data.augment.flip": "flip",
    "data.augment.flip random": "hflip fliplr",
    "data.augment.crop": "crop random-crop",
    "data.augment.cutout": "cutout",
    "data.augment.mixup": "mixup mixup-alpha",
    "data.augment.cutmix": "cutmix cutmix-alpha",
    "model.net": "m model arch architecture backbone",
    "model.lr": "learning-rate base-lr init-lr",
    "model.optimizer": "opt",
    "model.optimizer_options.weight_decay": "wd decay weight-decay",
    "model.optimizer_options.momentum": "momentum",
    "weight_average.decay": "ema model-ema ema-decay",
    "class_weights.kind": "class-weight class-weights",
    "balanced": "sampling",
    "margins": "margins",
    "compile": "compile",
    "finetune.weights": "pretrained initial-checkpoint",
    "early_stop.patience": "early-stopping patience",
    "seed_everything": "random-state manual-seed",
    "logger": "loggers report-to log-with tracker",
    "logger wandb": "wandb",
    "logger mlflow": "mlflow",
    "logs": "o output output-dir out-dir save-dir default-root-dir project",
    "ckpt_path": "checkpoint resume-from load-from",
    "debug": "verbose",
}
SYNONYMS = {word: setting for setting, words in _SYNONYMS.items() for word in words.split()}
TRAINING = ("fit", "train", "validate", "test", "predict")
LOGS = "lightning_logs"
SWITCH = {"": "{}", "true": "{}", "false": "null"}  # values that turn a feature on and off
DEFAULT_RECIPES = {"gpu": "fast94", "bf16": "cpu91", "cpu": "cpu91"}  # bf16: CPUs with bfloat16 instructions
RECIPES = Path(__file__).parent.parent / "recipes"
GROUPS = ("--data.augment", "--data.split")
NO_PATH = "#" * 256  # longer than a file name: the parser would read a file that is called like a configuration


@dataclass
class Command:
    """A training command with its arguments."""

    name: str  # one of TRAINING
    recipe: str | None = None  # a packaged recipe, or the path of a YAML file
    configs: list[str] = field(default_factory=list)  # further YAML files; later ones take precedence
    logs: str | None = None
    resume: str | None = None  # "" for the newest run, a path, or None to start a new run
    trust: bool = False
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
        return any(word.partition("=")[0] in ("-h", "--help") or word.startswith("--print_") for word in self.flags)

    def values(self, flag: str) -> list[str]:
        """Return all values of a long flag, in order."""
        return [word.partition("=")[2] for word in self.flags if word.startswith(f"--{flag}=")]

    def value(self, flag: str) -> str | None:
        """Return the last value of a long flag; None if it is not given."""
        return next(reversed(self.values(flag)), None)


def machine_kind(accelerator: str | None = None) -> str:
    """Return the kind of this machine, a key of `DEFAULT_RECIPES`. accelerator: "cpu" ignores the GPUs."""
    from cifar_lit.hardware import detect_machine  # imports torch

    machine = detect_machine()
    if machine.gpus and accelerator != "cpu":
        return "gpu"
    return "bf16" if machine.bf16 else "cpu"


def recipe_names() -> list[str]:
    """Return the names of the packaged recipes in alphabetical order."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def recipe_path(name: str) -> Path:
    """Return the YAML file of a packaged recipe, or `name` as a path; raise UsageError if there is none."""
    path = Path(name).expanduser()
    if (path / "config.yaml").is_file():
        raise UsageError(f"--recipe {name} is a run folder: repeat the run with --config {path / 'config.yaml'}")
    if path.suffix not in (".yaml", ".yml"):
        return packaged_recipe(name)
    if not path.is_file():
        hint = nearest(path.stem, recipe_names()).replace("mean ", "mean --recipe ")
        hint = hint or " Check the path; `cifar-lit recipes` lists the packaged ones."
        raise UsageError(f"there is no recipe file {name}.{hint}")
    return path


def packaged_recipe(name: str) -> Path:
    """Return the YAML file of a packaged recipe; raise UsageError if there is none of this name."""
    names = recipe_names()
    if name not in names:
        file = f" Your own file: {name}.yaml." if Path(f"{name}.yaml").is_file() else nearest(name, names)
        raise UsageError(f"no recipe is called {name!r}.{file} There are {', '.join(names)}.")
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
            before = argv[begin - 1] if begin else ""
            raise UsageError(f"unexpected argument {word!r}.{_stray_word_hint(name, word, before)}")
        flag, equals, value = word.partition("=")
        key = flag.removeprefix("--")
        if flag == "-c":
            key = "config"
        has_value = bool(equals)
        is_switch = key in ("trust", "debug")
        if not equals and not is_switch and remaining and not _is_flag(remaining[0]):
            value, has_value = remaining.popleft(), True
        if key == "debug":
            pass  # handled by `main`
        elif key == "trust" and not equals:
            command.trust = True
        elif key == "resume" or (key == "ckpt_path" and name in ("fit", "train")):
            command.resume = value
        elif key in _EXAMPLES:
            if not has_value:
                raise UsageError(f"{flag} needs a value, as in {flag} {_EXAMPLES[key]}")
            if key in SHORT:
                command.flags.append(f"--{SHORT[key]}={value}")
            elif key in SEVERAL:
                command.several[key] = value
            elif key != "config":
                setattr(command, key.replace("-", "_"), value)
            else:
                command.configs.append(_config_file(value))
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
    path = Path(name).expanduser()
    if path.is_file():
        return name
    if (path / "config.yaml").is_file():
        raise UsageError(f"--config {name} is a folder: name its file, {path / 'config.yaml'}")
    remedy = f". Did you mean --recipe {name}?" if name in recipe_names() else ": check the path"
    raise UsageError(f"there is no configuration file {name}{remedy}")


def _stray_word_hint(command: str, word: str, before: str) -> str:
    """Return the remedy for an unexpected argument, as a sentence. before: the argument before it, or ''."""
    if _is_flag(before) and before.endswith("="):
        return f" Leave out the space after {before}"
    if word.startswith(("–", "—", "−")):  # typographic dashes, as copied from a formatted page
        return f" It begins with a typographic dash. Did you mean --{word.lstrip('–—−-')}?"
    if word in TRAINING:
        return f" The command comes first: cifar-lit {word} …"
    if word == "help":
        return f" Did you mean {command} --help?"
    if word in recipe_names():
        return f" Did you mean --recipe {word}?"
    if "=" in word:
        return f" Did you mean --{word}?"
    joined, path = f"{before.rpartition('=')[2]} {word}", Path(word).expanduser()
    if before and Path(joined).expanduser().exists():
        return f' Put a path with spaces into quotes: "{joined}"'
    if path.suffix in (".yaml", ".yml"):
        return f" Did you mean --config {word}?"
    if path.suffix == ".ckpt" or (path / "checkpoints").is_dir():
        if command in ("fit", "train"):
            return f" Did you mean --resume {word}?"
        if path.suffix != ".ckpt":
            path = path / "checkpoints" / "best.ckpt"
        return f" Did you mean --ckpt_path {path}?"
    if path.is_dir():
        return f" Did you mean --dataset folder --data-dir {word}?"
    return " Flags begin with --, see --help."


def check_one_device(devices: str | None, what: str) -> None:
    """Raise UsageError if --devices selects several devices. what: begins the message, such as "--folds trains"."""
    if devices is not None and not is_one_device(devices):
        raise UsageError(f"{what} on one device, not on --devices {devices}: use 1, or an id such as [0]")


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
    line += inline_groups(command.flags)
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
            named = model.get(part) or named
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
    settings: dict[str, object] = plain_values(path) or {}
    for name in FEATURES:
        if isinstance(settings.get(name), bool):
            settings[name] = {} if settings[name] else None
    data = settings.get("data")
    if isinstance(data, dict) and "augment" in data and data["augment"] is None:
        data["augment"] = _all_off()
    return settings


def inline_groups(words: Sequence[str]) -> list[str]:
    """Return words with JSON in place of a file, or of null, for `--data.augment` and `--data.split`.

    The parser has no null for a group, and takes the name of a file, such as split.yaml, for the path of a class.
    """
    replaced: list[str] = []
    for word in words:
        if replaced and replaced[-1] in GROUPS:
            word = f"{replaced.pop()}={word}"
        flag, _, value = word.partition("=")
        path = Path(value).expanduser()
        if word == "--data.augment=null":
            word = f"{flag}={json.dumps(_all_off())}"
        elif flag in GROUPS and path.suffix in (".yaml", ".yml"):
            if not path.is_file():
                raise UsageError(f"{flag} takes a YAML file, and there is no file {value}")
            word = f"{flag}={json.dumps(plain_values(path), default=str)}"
        replaced.append(word)
    return replaced


def _all_off() -> dict[str, object]:
    from cifar_lit.data.augment import Augment  # imports torch

    return asdict(Augment())
