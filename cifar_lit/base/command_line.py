"""Parsers of commands, and one line for their errors, with the nearest valid name."""

from __future__ import annotations

import json
import re
from argparse import Action
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, DefaultHelpFormatter, Namespace

from cifar_lit.base.errors import UsageError, nearest
from cifar_lit.base.trust import REFUSED

# Flags of other programs that are not spelt like ours.
SYNONYMS = {
    "learning-rate": "lr",
    "weight-decay": "model.optimizer_options.weight_decay",
    "wd": "model.optimizer_options.weight_decay",
    "gpus": "devices",
    "amp": "precision",
    "fp16": "precision",
    "arch": "net",
    "pretrained": "weights",
    "ema": "weight_average.decay",
    "output-dir": "logs",
}
# Settings of classes that the program sets.
DERIVED = {}
for name in ("data.seed", "model.input_shape", "model.num_classes"):
    DERIVED[name] = f"{name} is set from --seed or the data: leave it out"


class HelpFormatter(DefaultHelpFormatter):
    """Help of jsonargparse without `default: null`: the text names what happens then."""

    def _get_help_string(self, action: Action) -> str:
        text = super()._get_help_string(action) or ""
        if action.default is None:
            text = text.replace(", default: %(default)s", "")
        return text


PARSER_SETTINGS: dict[str, Any] = {"exit_on_error": False, "allow_abbrev": False, "formatter_class": HelpFormatter}


def command_parser(name: str, description: str) -> ArgumentParser:
    """Return the parser of a command on runs. It raises its errors and accepts no abbreviations."""
    parser = ArgumentParser(prog=f"cifar-lit {name}", description=description, **PARSER_SETTINGS)
    # `main` handles --trust.
    parser.add_argument("--trust", action="store_true", help="let the run name any class: its code runs")
    return parser


def add_device(parser: ArgumentParser) -> None:
    """Add the flag of the device."""
    parser.add_argument("--accelerator", type=str, default="auto", help="device: auto, cpu, gpu, cuda:1 or mps")


def add_data_dir(parser: ArgumentParser) -> None:
    """Add the flag of the folder of a run's images."""
    what = "folder of the images, if they were moved"
    parser.add_argument("--data-dir", type=str | None, default=None, help=what)


def add_coverage(parser: ArgumentParser) -> None:
    """Add the flag of prediction sets."""
    what = "also return a set of classes that contains the true one with this probability, such as 0.95"
    parser.add_argument("--coverage", type=float | None, default=None, metavar="P", help=what)


class ShortFlag(Action):
    """A short flag, which sets a setting as its long flag does.

    jsonargparse would also accept an alias among the `option_strings` of an action as a key of configuration files.
    """

    def __init__(self, flag: str, setting: str, long: Action) -> None:
        super().__init__([f"--{flag}"], long.dest)
        self.flag, self.setting, self.long = flag, setting, long

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Give the value to the long flag."""
        self.long(parser, namespace, values, f"--{self.setting}")


def add_short_flags(parser: ArgumentParser, short: Mapping[str, str]) -> None:
    """Add short flags for settings, and name them in the help. short: settings by flag, without dashes."""
    options = parser._option_string_actions
    for flag, setting in short.items():
        # A feature is one option, whose settings the parser finds by the name before the first dot.
        long = options.get(f"--{setting}") or options.get(f"--{setting.partition('.')[0]}")
        if long is None:  # a feature that was deleted
            continue
        options[f"--{flag}"] = ShortFlag(flag, setting, long)
        long.help = f"short: --{flag}; {long.help}"


def parsed(
    parser: ArgumentParser,
    argv: list[str],
    further: Iterable[str] = (),
    files: Iterable[Mapping[str, Any]] = (),
) -> Namespace:
    """Parse a command line; raise UsageError with one line.

    Args:
        further: valid flags that the parser does not have.
        files: settings of configuration files. Later ones take precedence, and flags over all.
    """
    configs = [f"--config={json.dumps(values)}" for values in files]
    try:
        return parser.parse_args([*configs, *argv])
    except ArgumentError as error:
        raise UsageError(_explain(str(error), parser, list(further))) from error


def instantiated(parser: ArgumentParser, settings: Namespace) -> Namespace:
    """Return settings with objects in place of classes and their arguments. Raise the UsageError of a class."""
    try:
        return parser.instantiate_classes(settings)
    except ValueError as error:
        if isinstance(error.__cause__, UsageError):
            raise error.__cause__ from None
        raise


def long_flags(parser: ArgumentParser) -> list[str]:
    """Return every long flag of a parser, without dashes."""
    options = parser._option_string_actions
    return [option.removeprefix("--") for option in options if option.startswith("--")]


def _explain(message: str, parser: ArgumentParser, further: Sequence[str]) -> str:
    """Return one line for a message of the parser, which may have several."""
    flags = {*long_flags(parser), *further}
    short = {}
    for action in parser._option_string_actions.values():
        if isinstance(action, ShortFlag):
            short[action.flag] = action.setting
    key = ".".join(re.findall(r'Parser key "(.+?)":', message))
    if match := re.match(r"argument (\S+): expected one argument", message):
        return f"{match[1]} needs a value"
    if match := re.match(r"unrecognized arguments: -+([^\s=]+)", message):
        return DERIVED.get(match[1]) or f"there is no flag --{match[1]}.{_flag_hint(match[1], flags)}"
    if match := re.search(r"(?:Group '(.+)' does not accept o|O)ption '(.+?)'", message):
        name = f"{match[1] or key}.{match[2]}".removeprefix(".")
        hint = nearest(short.get(name, name), flags.difference(short, [name]))
        return DERIVED.get(name) or f"no setting is called {name}.{hint}"
    if match := re.search(r"Importing '(\S+?)' is not allowed", message):
        return REFUSED.format(match[1])
    for flag, setting in short.items():
        if setting == key:
            message = f"--{flag}: {message}"
    parts = [flag for flag in further if flag.rpartition(".")[0] == key]
    if parts:
        message += f", settings: {', '.join(parts)}"
    return _one_line(message)


def _flag_hint(flag: str, flags: Collection[str]) -> str:
    name = SYNONYMS.get(flag)
    if name in flags:
        return f" Did you mean --{name}?"
    return nearest(flag, flags).replace("mean ", "mean --")


# Begins of the lines of a message that a reader does not need.
NOISE = ("Does not validate", "Subtypes", "Errors", "Given value type", "Expected a None", "Problem with")


def _one_line(message: str) -> str:
    """Return a message of the parser without the lines that repeat its types."""
    lines = []
    for line in message.splitlines():
        text = re.sub(r"<class '(.+?)'>|typing\.", r"\1", line.strip().removeprefix("- "))
        if text and not text.startswith(NOISE):
            lines.append(text.removesuffix(":"))
    return ", ".join(lines)
