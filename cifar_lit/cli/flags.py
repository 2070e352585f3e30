"""The command line as typed, turned into what LightningCLI takes: short flags, recipe first, then configs, then flags.

Pure functions of the words, without torch, so that a typing error is answered at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import yaml

from cifar_lit.errors import UsageError, nearest

SHORT = {
    "devices": "trainer.devices",
    "accelerator": "trainer.accelerator",
    "nodes": "trainer.num_nodes",
    "precision": "trainer.precision",
    "epochs": "trainer.max_epochs",
    "dataset": "data.dataset",
    "data-dir": "data.root",
    "batch-size": "data.batch_size",
    "net": "model.net",
    "lr": "model.lr",
    "seed": "seed_everything",
    "checkpoint-every": "checkpoint_every",
    "rank-timeout": "rank_timeout",
}
OWN = ("recipe", "config", "logs", "resume", "trust", "auto-batch", "auto-lr", "debug")
TRAINING = ("fit", "train", "validate", "test", "predict")
LOGS = "lightning_logs"
RECIPES = Path(__file__).parent.parent / "recipes"


@dataclass
class Command:
    """A training command: its name, and the pieces that LightningCLI's line is built from.

    resume: "" for the newest run, a path, or None when nothing is to be resumed. trust: configuration files may name any class.
    auto: which of "batch" and "lr" are to be found before the training. job: what a new run's folder records of the
    scheduler's job that it belongs to, None outside one.
    """

    name: str
    recipe: str | None = None
    configs: list[str] = field(default_factory=list)
    logs: str | None = None
    resume: str | None = None
    trust: bool = False
    auto: set[str] = field(default_factory=set)
    flags: list[str] = field(default_factory=list)
    job: str | None = None

    @property
    def asks_only(self) -> bool:
        """Whether nothing is to be run: help or a printed configuration is wanted."""
        return any(flag.split("=")[0] in ("-h", "--help", "--print_config") or flag.startswith("--print_") for flag in self.flags)

    def without(self, flag: str) -> list[str]:
        """The flags but for one long one and its values."""
        kept: list[str] = []
        drop = False
        for word in self.flags:
            drop = (drop and not word.startswith("--")) or word == f"--{flag}" or word.startswith(f"--{flag}=")
            if not drop:
                kept.append(word)
        return kept

    def value(self, flag: str) -> str | None:
        """The last value given for a long flag, None when it is not on the line."""
        found = None
        for position, word in enumerate(self.flags):
            if word == f"--{flag}" and position + 1 < len(self.flags):
                found = self.flags[position + 1]
            elif word.startswith(f"--{flag}="):
                found = word.partition("=")[2]
        return found


def recipe_names() -> list[str]:
    """The packaged recipes, in alphabetical order."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def recipe_path(name: str) -> Path:
    """The YAML file of a packaged recipe, or of one's own when `name` is a path.

    Raises UsageError when there is none.
    """
    packaged = RECIPES / f"{name}.yaml"
    if packaged.is_file() and "/" not in name:
        return packaged
    own = _at_home(name)
    if own.suffix in (".yaml", ".yml"):
        if own.is_file():
            return own
        raise UsageError(f"there is no recipe file {name}")
    names = recipe_names()
    raise UsageError(f"no recipe is called {name!r}.{nearest(name, names)} There are {', '.join(names)}.")


def _at_home(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UsageError(f"{path} begins with a home that is not on this machine: write the path out") from None


def parse(name: str, words: list[str]) -> Command:
    """Sorts the words of a training command.

    Raises UsageError for a flag without its value, and for a word that belongs to no flag.
    """
    command = Command(name)
    rest = list(words)
    previous_takes_value = False
    while rest:
        word = rest.pop(0)
        flag, given, value = word.partition("=")
        if not word.startswith("-") or _is_number(word):
            if not previous_takes_value:
                raise UsageError(f"{word!r} belongs to no flag; flags begin with --, see --help")
            command.flags.append(word)
            previous_takes_value = False
            continue
        previous_takes_value = False
        key = "config" if flag == "-c" else flag.removeprefix("--")
        if key == "debug":
            continue  # for whoever tells of a failure
        if key == "trust" and not given:
            command.trust = True
            continue
        if key in ("auto-batch", "auto-lr") and not given:
            command.auto.add(key.removeprefix("auto-"))
            continue
        if key == "resume" or (key == "ckpt_path" and name in ("fit", "train")):
            has_path = not given and bool(rest) and not rest[0].startswith("-")
            command.resume = value if given else rest.pop(0) if has_path else ""
        elif key in SHORT or key in ("recipe", "config", "logs"):
            if not given:
                if not rest or (rest[0].startswith("-") and not _is_number(rest[0])):
                    raise UsageError(f"{flag} needs a value, as in {flag} {_EXAMPLES[key]}")
                value = rest.pop(0)
            _store(command, key, value)
        else:
            command.flags.append(word)
            previous_takes_value = not given
    return command


_EXAMPLES = {
    "devices": "2", "accelerator": "gpu", "nodes": "2", "precision": "bf16-mixed", "epochs": "10", "dataset": "folder",
    "data-dir": "PATH", "batch-size": "128", "net": "resnet18", "lr": "0.1", "seed": "1", "recipe": "quickstart",
    "config": "my.yaml", "logs": "DIR", "checkpoint-every": "10m",
    "rank-timeout": "60",
}  # fmt: skip


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _store(command: Command, key: str, value: str) -> None:
    if key == "recipe":
        command.recipe = value
    elif key == "config":
        if not _at_home(value).is_file():
            raise UsageError(f"there is no configuration file {value}")
        command.configs.append(value)
    elif key == "logs":
        command.logs = value
    else:
        command.flags.append(f"--{SHORT[key]}={value}")


def arguments(command: Command, base: Path | None, subcommand: str) -> list[str]:
    """The line for LightningCLI: sub-command, base configuration (recipe or run), configs, flags.

    base: the weakest settings, None when only the configs and the defaults count.
    """
    line = [subcommand]
    if base:
        line += ["--config", str(base), f"--logs={LOGS}"]  # a run's configuration names the folder of that time
    for config in command.configs:
        line += ["--config", config]
    if command.recipe:
        line.append(f"--recipe={recipe_path(command.recipe).stem}")
    return line + command.flags + ([f"--logs={command.logs}"] if command.logs else [])


def recipe_header(path: Path) -> list[str]:
    """The comment on top of a recipe, line by line without the comment signs."""
    lines = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" "))
    return lines


def recipe_settings(path: Path) -> dict[str, object]:
    """The settings of a recipe as nested plain values."""
    found = yaml.safe_load(path.read_text())
    return found if isinstance(found, dict) else {}
