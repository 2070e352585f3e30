"""Parsers of commands, and one line for their errors, with the nearest valid name."""

from __future__ import annotations

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
}


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


def add_coverage(parser: ArgumentParser) -> None:
    """Add the flags of prediction sets."""
    add = parser.add_argument
    what = "also return a set of classes that contains the true one with this probability, such as 0.95"
    add("--coverage", type=float | None, default=None, metavar="P", help=what)
    add("--sets", type=str, default="lac", help="kind of sets: lac (the smallest) or aps (larger for unsure images)")
    add("--by-class", action="store_true", help="reach the coverage for the images of each class")


def parsed(
    parser: ArgumentParser, argv: list[str], further: Iterable[str] = (), short: Mapping[str, str] | None = None
) -> Namespace:
    """Parse a command line; raise UsageError with one line.

    further: valid flags that the parser does not have. short: short flags with the settings that they stand for.
    """
    try:
        return parser.parse_args(argv)
    except ArgumentError as error:
        raise UsageError(_explain(str(error), {*long_flags(parser), *further}, short or {})) from error


def long_flags(parser: ArgumentParser) -> list[str]:
    """Return every long flag of a parser, without dashes."""
    flags = []
    for action in parser._actions:
        for option in action.option_strings:
            if option.startswith("--"):
                flags.append(option.removeprefix("--"))
    return flags


def _explain(message: str, flags: Collection[str], short: Mapping[str, str]) -> str:
    """Return one line for a message of the parser, which may have several. flags: all valid flags, without dashes."""
    if match := re.match(r"unrecognized arguments: -+([^\s=]+)", message):
        return f"there is no flag --{match[1]}.{_flag_hint(match[1], flags)}"
    key = ".".join(re.findall(r'Parser key "(.+?)":', message))
    if match := re.search(r"ption '(.+?)' is not accepted", message):
        return f"no setting is called {key}.{match[1]}.{nearest(f'{key}.{match[1]}', flags)}"
    if match := re.search(r"does not accept (?:option|nested key) '(.+?)'", message):
        settings = [flag for flag in flags if flag not in short]
        return f"no setting is called {match[1]}.{nearest(short.get(match[1], match[1]), settings)}"
    if match := re.search(r"Importing '(\S+?)' is not allowed", message):
        return REFUSED.format(match[1])
    if match := re.match(r"Linked \"(.+?)\" must be|argument \S+ --> (\S+):", message):
        return f"{match[1] or match[2]} is set from --seed or the data: leave it out"
    for flag, long in short.items():
        if long == key:
            message = f"--{flag}: {message}"
    parts = [flag for flag in flags if flag.startswith(f"{key}.")]
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
