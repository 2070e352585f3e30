"""Explain errors in one line with an exit code. Errors of jsonargparse suggest the nearest valid name."""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
from collections.abc import Iterable
from traceback import walk_tb
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, DefaultHelpFormatter, Namespace

from cifar_lit.cli.flags import OWN, SHORT, SYNONYMS
from cifar_lit.errors import Failure, UsageError, first_line, nearest
from cifar_lit.features import FEATURES, feature_settings
from cifar_lit.files import DISK_FULL, find_os_error
from cifar_lit.text import printable

# Messages of torch's allocators, CUDA, cuBLAS and cuDNN. cuDNN finds no engine if none can allocate its workspace.
NO_MEMORY = re.compile("allocate memory|out of memory|ALLOC(ATION)?_FAILED|unable to find an engine")
LOST_PEER = re.compile("Connection (closed|reset) by peer|NCCL|Broken pipe|recvValue failed")
TIMEOUT = re.compile("[Tt]imed out|[Tt]imeout")


def explain_error(error: BaseException) -> tuple[str, int]:
    """Return the text to print (may be empty) and the exit code for an exception that ended a command."""
    line, code = _explain(error)
    if isinstance(error, Exception):  # the text of an interruption is our own and has two lines
        line = printable(line)
    if is_lost_peer(error) or is_timeout(error):
        line += resume_hint(error)
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"
    if rank == "0" or not line:
        return line, code
    if is_lost_peer(error) or code >= 128:  # the first process says it
        return "", code
    return f"[rank {rank}] {line}", code


def _explain(error: BaseException) -> tuple[str, int]:
    text, kind = first_line(error), type(error).__name__
    if isinstance(error, (UsageError, Failure)):
        return f"cifar-lit: {error}", error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "\ncifar-lit: stopped", 130
    if not isinstance(error, Exception):  # such as Interrupted
        hint = resume_hint(error)
        return f"cifar-lit: stopped{'.' * bool(hint)}{hint}", getattr(error, "exit_code", 1)
    if kind == "NotFiniteLoss":
        target = "the weights"
        if "weight" in text:
            target = "a checkpoint"
        remedy = "start again with a lower --lr, or resume with --precision 32-true"
        text += f"; stopped before it reached {target}. Checkpoints are intact: {remedy}"
    elif isinstance(error, RuntimeError) and NO_MEMORY.search(str(error)):
        text = "out of memory: halve --batch-size or --data.eval_batch_size, or choose a smaller --net"
    elif (full := find_os_error(error)) and full.errno in DISK_FULL:
        remedy = "start again"
        if getattr(error, "resume", None):
            remedy = "resume with --resume"
        text = f"the disk is full ({full.filename or 'while writing'}): free some space, then {remedy}"
    elif isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return "cifar-lit: a file name is too long for the file system: check the path", 2
    elif isinstance(error, PermissionError):
        text = f"no permission for {error.filename}: choose another folder with --logs or --data-dir"
    elif text.startswith("operator torchvision::"):  # torchvision's compiled operators do not load
        text = "torch and torchvision are of different builds: uninstall both, then install both from one source"
    elif text.startswith("Could not determine home directory"):  # pathlib, for ~name with an unknown user
        return "cifar-lit: a path begins with an unknown home folder: write the path out", 2
    elif text.startswith("embedded null"):  # os
        return "cifar-lit: a path contains a NUL character: check the path", 2
    elif isinstance(error, UnicodeEncodeError):
        return "cifar-lit: a name is no valid text (UTF-8): rename the file or folder", 2
    elif text.startswith("Symlink loop"):  # pathlib
        return "cifar-lit: a path contains a symbolic link to itself: give the real path", 2
    elif "EADDRINUSE" in text:
        port = os.environ.get("MASTER_PORT")
        return f"cifar-lit: MASTER_PORT {port} is in use by another process: choose another port on all machines", 2
    elif is_lost_peer(error):
        text = "another process of this run ended early: see its message for the reason."
    elif is_timeout(error):
        text = "another process of this run gave no answer within --rank-timeout."
    elif kind != "MisconfigurationException" and _while_restoring(error):
        text = f"the checkpoint is damaged or does not fit this run ({kind}: {text}): use another one"
    elif kind == "MisconfigurationException" or isinstance(error, ValueError):
        return f"cifar-lit: {text}", 2
    else:
        text = f"{kind}: {re.sub(r' object at 0x[0-9a-f]+', '', text)} (--debug shows where)"
    return f"cifar-lit: {text}", 1


def resume_hint(error: BaseException) -> str:
    """Return the command that resumes the run as the end of a message, empty without a checkpoint."""
    command = getattr(error, "resume", None)
    if command:
        return f" Resume with:\n  {command}"
    return ""


def is_timeout(error: BaseException) -> bool:
    """Return whether another process of the run did not take part in a collective call."""
    return isinstance(error, RuntimeError) and TIMEOUT.search(str(error)) is not None


def is_lost_peer(error: BaseException) -> bool:
    """Return whether the error follows from the loss of another process of the run."""
    return isinstance(error, RuntimeError) and LOST_PEER.search(str(error)) is not None


def _while_restoring(error: BaseException) -> bool:
    """Return whether Lightning was restoring a checkpoint when the error was raised."""
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code.co_filename.endswith("checkpoint_connector.py"):
            return True
    return False


# ---- errors of the parser

SHORT_OF = {long: short for short, long in SHORT.items()}
UNTRUSTED = "a configuration file names {}, whose code would run: leave it out, or give --trust if you trust the file"
_PRECISIONS = {  # names used by other programs
    **dict.fromkeys(("fp16", "float16", "half", "amp", "mixed", "mixed16", "mixed_float16"), "16-mixed"),
    **dict.fromkeys(("bfloat16", "mixed_bfloat16"), "bf16-mixed"),
    **dict.fromkeys(("fp32", "float32", "float", "full", "single"), "32-true"),
    **dict.fromkeys(("fp64", "float64", "double"), "64-true"),
}
_TYPES = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "dict": "a mapping"}


# A sentence of Lightning's help. Our default may be another.
STATED_DEFAULT = re.compile(r"\s*\b(?:Default: |Disabled by default |If [^.]* defaults? to )\S.*?\.(?=\s|$)")


class OneDefault(argparse.HelpFormatter):
    """Help that names one default: the value, or the text's if the value is null."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = super()._get_help_string(action) or ""
        if action.default is not None:
            return STATED_DEFAULT.sub("", text)
        for null in (", default: %(default)s", " (default: %(default)s)", "Default: ``None``."):
            text = text.replace(null, "")
        return text


class HelpFormatter(OneDefault, DefaultHelpFormatter):
    """Help of jsonargparse with one default for each flag."""


PARSER_SETTINGS: dict[str, Any] = {"exit_on_error": False, "allow_abbrev": False, "formatter_class": HelpFormatter}


def command_parser(name: str, description: str) -> ArgumentParser:
    """Return the parser of a command on runs. It raises its errors and accepts no abbreviations."""
    parser = ArgumentParser(prog=f"cifar-lit {name}", description=description, **PARSER_SETTINGS)
    # `main` handles --trust.
    parser.add_argument(
        "--trust", action="store_true", help="let the run name any class and any path: its code can run"
    )
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


def explain_parser_error(message: str, keys: Iterable[str]) -> str:
    """Return one line for a message of the parser, which may have several. keys: all valid flags, without dashes."""
    if match := re.search(r"Importing '(\S+?)' is not allowed", message):
        return UNTRUSTED.format(match[1])
    if match := re.match(r"unrecognized arguments: (\S+)", message):
        flag = match[1].partition("=")[0]
        return f"there is no flag {flag}.{_flag_hint(flag, keys)}"
    if match := re.match(r"argument -h/--help: ignored explicit argument '(.*)'", message):
        return "write --help alone, with two dashes and without a value"
    if match := re.match(r"the following arguments are required: (.+)", message):
        flags = set(keys)
        names = []
        for name in match[1].split(", "):
            if name in flags:
                names.append(f"--{name}")
            else:
                names.append(name.upper())
        return f"{' and '.join(names)} must be given, see --help"
    if match := re.search(r"does not accept (?:option|nested key) '(.+?)'", message):
        return f"no setting is called {match[1]}.{_setting_hint(match[1], keys)}"
    if match := re.match(
        r'Parser key "(data|data.augment|data.split|model|trainer)":\s*Unable to load config \'(.*)\'', message
    ):
        hint = ""
        if match[1] in SYNONYMS:
            hint = _flag_hint(match[1], keys).replace("?", f" {match[2]}?")
        return f"--{match[1]} takes a YAML file, and there is no file {match[2]}.{hint}"
    if match := re.match(r"Linked \"(.+?)\" must be|argument \S+ --> (\S+):", message):
        source = "the data"
        if match[1] == "data.seed":
            source = "--seed"
        return f"{match[1] or match[2]} is set from {source}: leave it out"
    if match := re.match(r"argument (--[^\s/:]+).*expected (?:one|at least one) argument", message):
        return f"{match[1]} needs a value"
    if match := re.match(r'Parser key "(.+?)":', message):
        return _wrong_value(match[1], message)
    return " ".join(line.strip() for line in message.splitlines() if line.strip())


def _flag_hint(flag: str, keys: Iterable[str]) -> str:
    """Return `" Did you mean --X?"` for an unknown flag, which may be one of another program, or an empty string."""
    flags = set(keys)
    word = flag.lstrip("-")
    setting, _, value = _known_as(word, flags).partition(" ")
    for name in (SHORT_OF.get(setting), setting):
        if name in flags:
            return f" Did you mean --{f'{name} {value}'.strip()}?"
    if len(word) < 2:
        return ""
    # The dashes are left out: they would make any two flags similar.
    return nearest(word, flags).replace("mean ", "mean --")


def _setting_hint(key: str, keys: Iterable[str]) -> str:
    """Return `" Did you mean X?"` for an unknown YAML key, or an empty string. Short flags are not valid keys."""
    settings = [name for name in keys if name in ("recipe", "logs") or name not in (*SHORT, *OWN)]
    setting = SHORT.get(_dashed(key.rpartition(".")[2])) or _known_as(key, settings).partition(" ")[0]
    if setting in settings:
        return f" Did you mean {setting}?"
    return nearest(key, settings)


def _known_as(name: str, settings: Iterable[str]) -> str:
    """Return the setting that another program, or another group of settings, calls `name`; "" if there is none."""
    group, _, last = name.rpartition(".")
    if group in ("", "trainer", "model", "data") and (setting := SYNONYMS.get(_dashed(last))):
        return setting
    same_name = [setting for setting in settings if setting.endswith(f".{last}")]
    if len(same_name) == 1:
        return same_name[0]
    return ""


def _dashed(name: str) -> str:
    return name.lower().replace("_", "-")


def _wrong_value(key: str, message: str) -> str:
    name = key
    if key in SHORT_OF:
        name = f"--{SHORT_OF[key]} ({key})"
    value = "that"
    if typed := re.search(r"(?:Given value|Got value): (.*)", message):
        value = typed[1].strip()
    if key in FEATURES:
        return _wrong_feature(key, value, message)
    if match := re.search(r"dot import path string: (\S+)", message):
        names: set[str] = set()
        for group in ("callbacks", "loggers", "profilers", "strategies"):
            module = sys.modules.get(f"lightning.pytorch.{group}")
            names.update(getattr(module, "__all__", ()))
        return f"{name}: no class is called {match[1]}; give its import path.{nearest(match[1], names)}"
    if match := re.search(r"module '(\S+)' has no attribute '(\w+)'", message):
        return f"{name}: {match[1]} has no {match[2]!r}.{nearest(match[2], dir(sys.modules.get(match[1])))}"
    if match := re.search(r"class_path '(\S+?)':\s+Option '(.+?)' is not accepted", message):
        return f"{name}: {match[1].rpartition('.')[2]} has no setting {match[2]}"
    if key == "trainer.precision":
        precisions = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")
        hint = nearest(_PRECISIONS.get(value.lower(), value), precisions)
        return f"{name} must be one of {', '.join(precisions)}, not {value}.{hint}"
    if match := re.search(r"(\S+) does not conform to restriction (.+)", message):
        return f"{name} must be {match[2].replace('v', '')}, not {match[1]}"
    literals = " ".join(re.findall(r"Literal\[(.*?)\]", message))
    choices = list(dict.fromkeys(re.findall(r"'([^']+)'", literals)))
    types = re.findall(r"Expected (?:a )?<class '(\w+)'>", message)
    if choices:
        if "bool" in types:
            choices = ["true", "false", *choices]
        return f"{name} must be one of {', '.join(choices)}, not {value}.{nearest(value, choices)}"
    kinds = [_TYPES[kind] for kind in types if kind in _TYPES]
    if "list[" in message and kinds:
        kinds.append("a list of them")
    elif "list[" in message:
        kinds.append("a list")
    if not kinds:
        return f"invalid {name}: {value}"
    return f"{name} must be {' or '.join(dict.fromkeys(kinds))}, not {value}"


def _wrong_feature(feature: str, value: str, message: str) -> str:
    settings = feature_settings(feature)
    listed = ", ".join(f"--{setting}" for setting in settings)
    if match := re.search(r"Option '(.+?)' is not accepted", message):
        hint = nearest(f"{feature}.{match[1]}", settings).replace("mean ", "mean --")
        if settings and not hint:
            hint = f" It has {listed}."
        return f"{feature} has no setting {match[1]}.{hint}"
    if match := re.search(r"the following arguments are required: (\w+)", message):
        return f"{feature} needs a {match[1]}: give --{feature}.{match[1]}"
    if match := re.search(r'Parser key "(\w+)":(.*)', message.partition("\n")[2], re.DOTALL):
        return _wrong_value(f"{feature}.{match[1]}", match[2])
    fault = f"--{feature} takes true or false, not {value}"
    if settings:
        fault += f"; its settings are {listed}"
    return fault
