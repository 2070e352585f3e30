"""Dispatch a command line to its command, and turn a failure into one line and an exit code."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from pkgutil import resolve_name

from cifar_lit.base.errors import UsageError, nearest, unusable_package
from cifar_lit.base.hardware import limit_busy_waiting
from cifar_lit.base.signals import STOP_SIGNALS
from cifar_lit.base.text import accept_any_encoding, note, say
from cifar_lit.base.trust import allow_typed
from cifar_lit.cli import flags

COMMANDS = {
    "fit": "train and validate (the default)",
    "train": "fit, then test the best checkpoint once",
    "validate": "score a checkpoint on the validation images",
    "test": "score a checkpoint; test RUN compares with what it recorded",
    "predict": "write the predictions of a checkpoint for the test images",
    "recipes": "list recipes with accuracy and training time",
    "devices": "list devices; --check trains on each of them",
    "classify": "predict the classes of image files",
    "report": "write the report of a run: curves, mistakes, label errors",
    "review": "correct labels in the browser, the most suspicious first",
    "compare": "compare settings and accuracies of runs, with a test",
    "export": "export a net to ONNX, torch-export or the Hugging Face hub",
    "serve": "serve a net over HTTP, with a web page to try it",
}
# Commands other than LightningCLI's. Each function takes the arguments after the command, and may return an exit code.
# In the core, only this table and `inference.load` name extras.
OWN = {
    "recipes": "cifar_lit.cli.recipes:list_recipes",
    "devices": "cifar_lit.cli.devices:list_devices",
    "classify": "cifar_lit.cli.classify:classify",
    "report": "cifar_lit.cli.report:report",
    "review": "cifar_lit.extras.label.review:review",
    "compare": "cifar_lit.cli.compare:compare",
    "export": "cifar_lit.cli.export:export",
    "export --to hub": "cifar_lit.extras.hub:export_to_hub",
    "serve": "cifar_lit.extras.serve.command:serve",
    "test RUN": "cifar_lit.cli.retest:test_again",
}


def main(argv: list[str] | None = None, default: str = "fit") -> int:
    """Run a command line. A failure prints one line to stderr, and before it a traceback with --debug.

    Args:
        argv: arguments without the program's name. None means `sys.argv[1:]`.
        default: the command to run if `argv` begins with a flag.

    Returns:
        Exit code: 0, 2 for invalid input, 1 for a failure, 128 + the signal's number for an interruption.
    """
    if argv is None:
        argv = sys.argv[1:]
    limit_busy_waiting()
    accept_any_encoding()
    try:
        sys.path.append(str(Path.cwd()))  # for own nets; the last folder, so that no file there replaces a package
        allow_typed(argv, trust="--trust" in argv)
        return _run(argv, default)
    except BaseException as error:
        return _report(error, "--debug" in argv)


def overview() -> list[str]:
    """Return the lines of `cifar-lit --help`."""
    commands = [f"  {name:<10} {text}" for name, text in COMMANDS.items()]
    title = "Flags of fit, train, validate, test and predict:"
    return [
        "usage: cifar-lit [COMMAND] [flags]",
        "",
        "commands",
        *commands,
        "",
        title,
        *flags.flag_lines("train"),
        *END,
    ]


END = (
    "",
    "Every setting of Trainer, model, data and features is a flag too, such as",
    "--model.label_smoothing: `cifar-lit fit --help-all` lists them.",
    "Precedence: recipe < --config files < flags.",
)


def _run(argv: list[str], default: str) -> int:
    name, arguments = _split(argv, default)
    if name in ("help", "--help", "-h"):
        say(*overview())
    elif name == "--version":
        from cifar_lit import __version__

        say(f"cifar-lit {__version__}")
    elif name in flags.TRAINING:
        if {"--help", "-h", "--help-all"}.intersection(arguments):
            say(f"usage: cifar-lit {name} [flags]", "", f"{COMMANDS[name]}", *flags.flag_lines(name), *END)
        if not {"--help", "-h"}.intersection(arguments):
            _train(flags.parse(name, arguments), arguments)
    elif name in OWN:
        code: int | None = resolve_name(OWN[name])([word for word in arguments if word != "--debug"])
        return code or 0
    else:
        hint = _command_hint(name, list(COMMANDS))
        raise UsageError(f"no command is called {name!r}.{hint} There are {', '.join(COMMANDS)}.")
    return 0


def _split(argv: list[str], default: str) -> tuple[str, list[str]]:
    """Return the command of a command line and its arguments."""
    if not argv:
        return ("help" if default == "fit" else default), argv
    name, *arguments = argv
    if name.startswith("-") and name not in ("--help", "-h", "--version"):
        return default, argv
    if name == "export" and "--to hub" in " ".join(arguments).replace("=", " "):
        name = "export --to hub"
    elif name == "test" and arguments and not arguments[0].startswith("-"):
        name = "test RUN"
    return name, arguments


def _command_hint(name: str, commands: list[str]) -> str:
    """Return `" Did you mean X?"` for an unknown command, which may be a recipe."""
    if name in flags.recipe_names():
        return f" Did you mean train --recipe {name}?"
    return nearest(name, commands)


def _train(command: flags.Command, argv: list[str]) -> None:
    """Run fit, train, validate, test or predict. A launcher may have started several such processes."""
    from cifar_lit.cli.launch import apply_launcher, continue_job

    if command.recipe:
        flags.recipe_path(command.recipe)  # report an unknown recipe before the slow imports
    apply_launcher(command, os.environ)
    from cifar_lit.cli.quiet import catch_signals, quieten

    quieten()
    from cifar_lit.cli.ranks import end_with_parent

    end_with_parent()
    continue_job(command, argv, os.environ)
    catch_signals()
    if command.several and not command.asks_only:
        resolve_name(flags.SEVERAL[next(iter(command.several))])(command)
    else:
        from cifar_lit.cli.fit import run_command

        run_command(command)


def _report(error: BaseException, debug: bool) -> int:
    for number in STOP_SIGNALS:  # nothing is left to save: another signal ends the process quietly
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler):
            signal.signal(number, signal.SIG_DFL)
    if isinstance(error, SystemExit):
        return int(error.code or 0)
    if debug:
        import traceback

        note(*"".join(traceback.format_exception(error)).splitlines())
    try:
        from cifar_lit.cli.errors import explain_error
    except (ImportError, OSError) as missing:
        error = missing
    if fault := unusable_package(error):
        note(f"cifar-lit: {fault}")
        return 1
    line, code = explain_error(error)
    if getattr(error, "requeue", False):
        from cifar_lit.cli.launch import requeue

        line = requeue(os.environ, getattr(error, "resume", None))
    if line:
        note(*line.split("\n"))
    return code
