"""Parsers of commands, and one line for their errors, with the nearest valid name."""

from __future__ import annotations

import json
import re
from argparse import Action
from collections.abc import Collection, Iterable, Mapping
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
    "data.train_count": "data.split.share",
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


def parsed(
    parser: ArgumentParser,
    argv: list[str],
    further: Iterable[str] = (),
    short: Mapping[str, str] | None = None,
    files: Iterable[tuple[str, Mapping[str, Any]]] = (),
) -> Namespace:
    """Parse a command line; raise UsageError with one line.

    Args:
        further: valid flags that the parser does not have.
        short: settings by short flag, for messages.
        files: paths and settings of configuration files. Later ones take precedence, and flags over all.
    """
    configs = [(file, f"--config={json.dumps(values)}") for file, values in files]
    try:
        return parser.parse_args([*(config for _, config in configs), *argv])
    except ArgumentError as error:
        fault, place = error, ""
    for file, config in configs:
        try:
            parser.parse_args([config])
        except ArgumentError as alone:
            if str(alone) == str(fault):
                place = f"{file}: "
    raise UsageError(place + _explain(str(fault), {*long_flags(parser), *further}, short or {})) from fault


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


def _explain(message: str, longer: Collection[str], short: Mapping[str, str]) -> str:
    """Return one line for a message of the parser, which may have several."""
    flags = {*longer, *short}
    key = ".".join(dict.fromkeys(re.findall(r'Parser key "(.+?)":', message)))
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
    parts = sorted(flag for flag in longer if flag.startswith(f"{key}.") and not flag.endswith(".help"))
    if parts and not re.search(r"Expected|required", message):
        return f"{key} is a group: set its settings, {', '.join(parts[:3])} …"
    for flag, setting in short.items():
        if setting == key:
            message = f"--{flag}: {message}"
    line = _one_line(message)
    if "." not in key:  # a feature
        line = line.replace("a dot import path string", "true or false")
    if parts:
        line += f", settings: {', '.join(parts)}"
    return line


def _flag_hint(flag: str, flags: Collection[str]) -> str:
    name = SYNONYMS.get(flag)
    if name in flags:
        return f" Did you mean --{name}?"
    return nearest(flag, flags).replace("mean ", "mean --")


# Begins of the lines of a message that a reader does not need.
NOISE = (
    *("Does not validate", "Subtypes", "Errors", "Given value type", "Given value: Namespace"),
    *("Expected a None", "Expected a path", "Problem with"),
)


def _one_line(message: str) -> str:
    """Return a message of the parser without the lines that repeat its types."""
    lines = []
    for line in message.splitlines():
        text = re.sub(r"<class '(.+?)'>|typing\.|Parser key \"(.+?)\"", r"\1\2", line.strip().removeprefix("- "))
        if text and not text.startswith(NOISE):
            lines.append(text.removesuffix(":"))
    return ", ".join(lines)
