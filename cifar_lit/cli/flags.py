"""The command line as typed, turned into what LightningCLI takes: short flags, recipe first, then configs, then flags.

Pure functions of the arguments, without torch, so that a typing error is answered at once.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from cifar_lit.errors import UsageError, nearest
from cifar_lit.runs.config_file import plain_values

# Short flags: the long one that LightningCLI knows, and a value for the example that a missing one is answered with.
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
    "lr": ("model.lr", "0.1"),
    "seed": ("seed_everything", "1"),
    "checkpoint-every": ("checkpoint_every", "10m"),
    "rank-timeout": ("rank_timeout", "60"),
}
_EXAMPLES = {"recipe": "quickstart", "config": "my.yaml", "logs": "DIR", "folds": "5"} | {
    name: value for name, (_, value) in _SHORT.items()
}
SHORT = {name: long for name, (long, _) in _SHORT.items()}
OWN = ("recipe", "config", "logs", "resume", "trust", "auto-batch", "auto-lr", "folds", "debug")  # not for LightningCLI
# Flags and YAML keys of timm, Ultralytics, Keras and Lightning 1 that look unlike ours, by the setting that they stand
# for, with its value if the name implies one. Spelled with dashes, in lower case.
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
    "data.val_size": "val-split validation-split val-ratio",
    "data.image_size": "img input-size resolution crop-size",
    "data.augment": "aug transforms",
    "data.augment.mixup": "mixup mixup-alpha",
    "data.augment.cutmix": "cutmix cutmix-alpha",
    "data.flip random": "hflip fliplr",
    "model.net": "m model arch architecture backbone",
    "model.lr": "learning-rate base-lr init-lr",
    "model.optimizer": "opt",
    "model.weight_decay": "wd decay",
    "model.ema_decay": "ema model-ema",
    "model.weights": "weights pretrained initial-checkpoint",
    "model.patience": "early-stopping",
    "seed_everything": "random-state manual-seed",
    "logs": "o output output-dir out-dir save-dir default-root-dir project",
    "ckpt_path": "checkpoint resume-from load-from",
    "debug": "verbose",
}
SYNONYMS = {word: setting for setting, words in _SYNONYMS.items() for word in words.split()}
AUTO = {"auto-batch": "batch", "auto-lr": "lr"}
TRAINING = ("fit", "train", "validate", "test", "predict")
LOGS = "lightning_logs"
RECIPES = Path(__file__).parent.parent / "recipes"


@dataclass
class Command:
    """A training command: its name, and the pieces that LightningCLI's line is built from.

    Args:
        name: one of TRAINING.
        recipe: a packaged recipe, or the path of a YAML file.
        configs: files of further settings, the strongest last.
        resume: "" for the newest run, a path, or None when nothing is to be resumed.
        auto: which of "batch" and "lr" to search for before the training.
        flags: all others, as LightningCLI takes them, each one word with its value.
        folds: as typed, in how many parts the images are cut, of which each is tested on once; None for no cross-validation.
        job: what a new run's folder records of the scheduler's job that it belongs to.
    """

    name: str
    recipe: str | None = None
    configs: list[str] = field(default_factory=list)
    logs: str | None = None
    resume: str | None = None
    trust: bool = False
    auto: set[str] = field(default_factory=set)
    flags: list[str] = field(default_factory=list)
    folds: str | None = None
    job: str | None = None

    @property
    def asks_only(self) -> bool:
        """Whether nothing is to be run: help or a printed configuration is wanted."""
        return any(word.partition("=")[0] in ("-h", "--help") or word.startswith("--print_") for word in self.flags)

    def without(self, flag: str) -> list[str]:
        """The flags but for one long one."""
        return [word for word in self.flags if word.partition("=")[0] != f"--{flag}"]

    def values(self, flag: str) -> list[str]:
        """All values given for a long flag, in order."""
        return [word.partition("=")[2] for word in self.flags if word.startswith(f"--{flag}=")]

    def value(self, flag: str) -> str | None:
        """The last value given for a long flag, which is the one that counts; None when it is not on the line."""
        return next(reversed(self.values(flag)), None)


def recipe_names() -> list[str]:
    """The packaged recipes, in alphabetical order."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def recipe_path(name: str) -> Path:
    """Return the YAML file of a packaged recipe, or of a user's own if `name` is a path; raise UsageError if there is none."""
    path = _expand_home(name)
    if (path / "config.yaml").is_file():
        raise UsageError(f"--recipe {name} is a run folder: repeat the run with --config {path / 'config.yaml'}")
    if path.suffix not in (".yaml", ".yml"):
        return packaged_recipe(name)
    if not path.is_file():
        hint = nearest(path.stem, recipe_names()) or " Check the path; `cifar-lit recipes` lists the packaged ones."
        raise UsageError(f"there is no recipe file {name}.{hint.replace('mean ', 'mean --recipe ')}")
    return path


def packaged_recipe(name: str) -> Path:
    """Return the YAML file of a packaged recipe; raise UsageError if there is none of this name."""
    names = recipe_names()
    if name not in names:
        raise UsageError(f"no recipe is called {name!r}.{nearest(name, names)} There are {', '.join(names)}.")
    return RECIPES / f"{name}.yaml"


def _expand_home(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UsageError(f"{path} begins with a home that is not on this machine: write the path out") from None


def parse(name: str, argv: list[str]) -> Command:
    """Return the training command `name` with its arguments; of a repeated flag other than --config the last counts.

    Raises UsageError for a flag without its value, a word that belongs to no flag, or a missing --config file.
    """
    command = Command(name)
    rest = deque(argv)
    while rest:
        word = rest.popleft()
        if not _is_flag(word):
            before = argv[len(argv) - len(rest) - 2] if len(argv) > len(rest) + 1 else ""
            raise UsageError(f"{word!r} belongs to no flag.{_stray_word_hint(name, word, before)}")
        flag, equals, value = word.partition("=")
        key = "config" if flag == "-c" else flag.removeprefix("--")
        value_follows = not equals and bool(rest) and not _is_flag(rest[0])
        if key == "debug":
            pass  # `main` looks for it
        elif key == "trust" and not equals:
            command.trust = True
        elif key in AUTO and not equals:
            command.auto.add(AUTO[key])
        elif key == "resume" or (key == "ckpt_path" and name in ("fit", "train")):
            command.resume = rest.popleft() if value_follows else value
        elif key in _EXAMPLES:
            if not equals and not value_follows:
                raise UsageError(f"{flag} needs a value, as in {flag} {_EXAMPLES[key]}")
            value = rest.popleft() if value_follows else value
            if key in SHORT:
                command.flags.append(f"--{SHORT[key]}={value}")
            elif key != "config":
                setattr(command, key, value)
            else:
                command.configs.append(_config_file(value))
        else:
            command.flags.append(f"{word}={rest.popleft()}" if value_follows else word)
    return command


def _config_file(name: str) -> str:
    """Return `name` if it is a file; raise UsageError with the likely remedy otherwise."""
    path = _expand_home(name)
    if path.is_file():
        return name
    if (path / "config.yaml").is_file():
        raise UsageError(f"--config {name} is a folder: name its file, {path / 'config.yaml'}")
    if name in recipe_names():
        raise UsageError(f"there is no configuration file {name}. Did you mean --recipe {name}?")
    raise UsageError(f"there is no configuration file {name}: check the path")


def _stray_word_hint(command: str, word: str, before: str) -> str:
    """Return the remedy for a word that follows no flag, as a sentence. before: the preceding word of the line, or ''."""
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
    joined, path = f"{before.rpartition('=')[2]} {word}", _expand_home(word)
    if before and _expand_home(joined).exists():
        return f' Put a path with spaces into quotes: "{joined}"'
    if path.suffix in (".yaml", ".yml"):
        return f" Did you mean --config {word}?"
    if path.suffix == ".ckpt" or (path / "checkpoints").is_dir():
        checkpoint = path if path.suffix == ".ckpt" else path / "checkpoints" / "best.ckpt"
        return (
            f" Did you mean --resume {word}?"
            if command in ("fit", "train")
            else f" Did you mean --ckpt_path {checkpoint}?"
        )
    if path.is_dir():
        return f" Did you mean --dataset folder --data-dir {word}?"
    return " Flags begin with --, see --help."


def check_one_device(devices: str | None, what: str) -> None:
    """Raises UsageError unless the value of --devices, if there is one, is of one device, on which `what` ("bench measures")."""
    if devices is not None and not re.fullmatch(r"1|\d+,|\[\d+,?\]", devices):
        raise UsageError(f"{what} on one device, not on --devices {devices}: use 1, or name one as [0]")


def _is_flag(word: str) -> bool:
    """Whether a word begins as flags do, and is no negative number."""
    try:
        float(word)
    except ValueError:
        return word.startswith("-")
    return False


def arguments(command: Command, base: Path | None, subcommand: str) -> list[str]:
    """The line for LightningCLI: its sub-command, base configuration, configs, flags.

    base: the weakest settings, a recipe's or a run's; None when only the configs and the defaults count.
    """
    line = [subcommand]
    if base:
        line += ["--config", str(base)]
        if not command.recipe:
            line.append(f"--logs={LOGS}")  # a run's configuration names the folder of that time
    for config in command.configs:
        line += ["--config", config]
    if command.recipe:
        line.append(f"--recipe={recipe_path(command.recipe).stem}")
    return line + command.flags + ([f"--logs={command.logs}"] if command.logs else [])


def recipe_settings(path: Path) -> dict[str, object]:
    """The settings of a recipe as nested plain values."""
    return plain_values(path) or {}
