"""Explain errors in one line with an exit code. Errors of jsonargparse suggest the nearest valid name."""

from __future__ import annotations

import os
import re
from argparse import Action
from collections.abc import Collection, Iterable
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, DefaultHelpFormatter, Namespace

from cifar_lit.base.errors import Failure, UsageError, first_line, nearest
from cifar_lit.base.files import DISK_FULL, find_os_error
from cifar_lit.base.text import printable
from cifar_lit.base.trust import REFUSED
from cifar_lit.cli.flags import SHORT
from cifar_lit.features import FEATURES, feature_settings

# Messages of torch's allocators, CUDA, cuBLAS and cuDNN. cuDNN finds no engine if none can allocate its workspace.
NO_MEMORY = re.compile("allocate memory|out of memory|ALLOC(ATION)?_FAILED|unable to find an engine")
LOST_PEER = re.compile("Connection (closed|reset) by peer|NCCL|Broken pipe|recvValue failed")
TIMEOUT = re.compile("^(?!CUDA|DataLoader).*([Tt]imed out|[Tt]imeout)", re.DOTALL)


def explain_error(error: BaseException) -> tuple[str, int]:
    """Return the text to print (may be empty) and the exit code for an exception that ended a command."""
    line, code = _explain(error)
    if isinstance(error, Exception):  # the text of an interruption is our own and has two lines
        line = printable(line)
    if is_lost_peer(error) or is_timeout(error):
        line += resume_hint(error)
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    if rank == "0":
        return line, code
    if is_lost_peer(error) or code >= 128:  # the first process says it
        return "", code
    return f"[rank {rank}] {line}", code


def _explain(error: BaseException) -> tuple[str, int]:
    text = first_line(error)
    kind = type(error).__name__
    if isinstance(error, (UsageError, Failure)):
        return f"cifar-lit: {error}", error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "\ncifar-lit: stopped", 130
    if not isinstance(error, Exception):  # such as Interrupted
        return f"cifar-lit: stopped{resume_hint(error)}", getattr(error, "exit_code", 1)
    if kind == "NotFiniteLoss":
        remedy = "start again with a lower --lr, or resume with --precision 32-true"
        text += f"; the training was stopped, and its checkpoints are intact: {remedy}"
    elif isinstance(error, RuntimeError) and NO_MEMORY.search(str(error)):
        text = "out of memory: halve --batch-size or --data.eval_batch_size, or choose a smaller --net"
    elif (full := find_os_error(error)) and full.errno in DISK_FULL:
        text = f"the disk is full ({full.filename or 'while writing'}): free some space, then try again"
        text += resume_hint(error)
    elif text.startswith("operator torchvision::"):  # torchvision's compiled operators do not load
        text = "torch and torchvision are of different builds: uninstall both, then install both from one source"
    elif isinstance(error, PermissionError):
        text = f"no permission for {error.filename}: choose another folder with --logs or --data-dir"
    elif is_lost_peer(error):
        text = "another process of this run ended early: see its message for the reason"
    elif is_timeout(error):
        text = "another process of this run gave no answer within --rank-timeout"
    elif kind == "MisconfigurationException" or isinstance(error, ValueError):
        return f"cifar-lit: {text}", 2
    else:
        text = f"{kind}: {text} (--debug shows where)"
    return f"cifar-lit: {text}", 1


def resume_hint(error: BaseException) -> str:
    """Return the command that resumes the run as the end of a message, empty without a checkpoint."""
    command = getattr(error, "resume", None)
    if command:
        return f". Resume with:\n  {command}"
    return ""


def is_timeout(error: BaseException) -> bool:
    """Return whether another process of the run did not take part in a collective call."""
    return _is_of_torch(error) and TIMEOUT.search(str(error)) is not None


def is_lost_peer(error: BaseException) -> bool:
    """Return whether the error follows from the loss of another process of the run."""
    return _is_of_torch(error) and LOST_PEER.search(str(error)) is not None


def _is_of_torch(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and not isinstance(error, Failure)


# ---- errors of the parser

SHORT_OF = {long: short for short, long in SHORT.items()}
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


def parsed(parser: ArgumentParser, argv: list[str], further: Iterable[str] = ()) -> Namespace:
    """Parse a command line; raise UsageError with one line. further: valid flags that the parser does not have."""
    try:
        return parser.parse_args(argv)
    except ArgumentError as error:
        raise UsageError(explain_parser_error(str(error), {*long_flags(parser), *further})) from error


def long_flags(parser: ArgumentParser) -> list[str]:
    """Return every long flag of a parser, without dashes."""
    flags = []
    for action in parser._actions:
        for option in action.option_strings:
            if option.startswith("--"):
                flags.append(option.removeprefix("--"))
    return flags


def explain_parser_error(message: str, flags: Collection[str]) -> str:
    """Return one line for a message of the parser, which may have several. flags: all valid flags, without dashes."""
    if match := re.match(r"unrecognized arguments: -+([^\s=]+)", message):
        return f"there is no flag --{match[1]}.{_flag_hint(match[1], flags)}"
    key = ".".join(re.findall(r'Parser key "(.+?)":', message))
    if match := re.search(r"ption '(.+?)' is not accepted", message):
        return f"no setting is called {key}.{match[1]}.{nearest(f'{key}.{match[1]}', flags)}"
    if match := re.search(r"does not accept (?:option|nested key) '(.+?)'", message):
        settings = [flag for flag in flags if flag not in SHORT]
        return f"no setting is called {match[1]}.{nearest(SHORT.get(match[1], match[1]), settings)}"
    if match := re.search(r"Importing '(\S+?)' is not allowed", message):
        return REFUSED.format(match[1])
    if match := re.match(r"Linked \"(.+?)\" must be|argument \S+ --> (\S+):", message):
        return f"{match[1] or match[2]} is set from --seed or the data: leave it out"
    if key in SHORT_OF:
        message = f"--{SHORT_OF[key]}: {message}"
    if key in FEATURES:
        message += f", settings: {', '.join(feature_settings(key))}"
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
