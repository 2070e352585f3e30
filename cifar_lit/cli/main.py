"""From a command line to the command, and from its failure to one line and an exit code."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import nullcontext, suppress
from importlib import import_module
from pathlib import Path

from cifar_lit.cli import flags
from cifar_lit.errors import UsageError, nearest
from cifar_lit.hardware import limit_busy_waiting
from cifar_lit.plugins import all_imports_allowed, guard_child_processes
from cifar_lit.signals import STOP_SIGNALS
from cifar_lit.text import note, say

OVERVIEW = """usage: cifar-lit [COMMAND] [--recipe NAME] [--config FILE] [flags]

commands
  fit        train and validate (the default)
  train      fit, then one test of the best weights; the same as python scripts/train.py
  validate   score a checkpoint on the validation images
  test       score a checkpoint on the test images
  predict    write a checkpoint's predictions for the test images
  recipes    what each recipe is, reaches and takes; `recipes NAME` prints its settings
  devices    devices of this machine; `--check` trains on each, `--net NAME` lists a net's parameters
  preview    a sheet of one's own images, as a recipe's augmentation would show them in training
  classify   name what is on pictures, with a run's net; scripts/predict.py is the same
  report     a page about a run: curves, confusion matrix, mistakes, suspected label errors
  compare    runs beside each other: the settings that differ, accuracies, a test of their difference
  export     a run's net as ONNX, torch-export or safetensors, checked after writing
  serve      a run's net as an HTTP service with a page for trying it
  bench      measure recipes over seeds, or the devices of this machine

flags of fit, train, validate, test and predict
  --recipe NAME      packaged recipe, or a YAML file of your own
  --config FILE      further settings over the recipe's; may be given several times
  --dataset NAME     cifar10, cifar100, fashion_mnist, folder or shapes
  --data-dir PATH    where archives are kept, or the folder of own images
  --net NAME         such as resnet18; --lr X, --batch-size N (over all devices together)
  --auto-batch       find the largest batch that fits first; --auto-lr finds a learning rate
  --epochs N         --seed N, --precision P (32-true, bf16-mixed, 16-mixed)
  --devices N        or ids 0,1, or auto; --accelerator cpu|gpu|mps, --nodes N
  --rank-timeout 60  of several processes, one that gives no sign for so many seconds ends the run
  --logs DIR         folder for run folders (lightning_logs)
  --checkpoint-every 500 (steps) or 10m: checkpoints within epochs too; their ends have one anyway
  --folds 5          of `train`: cross-validation, a training for each fifth of the images, which is tested on
  --resume [PATH]    resume the newest unfinished run, or the given one
  --trust            let a --config file, or the config.yaml of a run, name classes of any package, whose code then runs, and
                     any place; also for the runs of classify, report, export and serve
  --debug            show the traceback of a failure

Every setting of Trainer, model and data is a flag too (--trainer.x, --model.x, --data.x):
`cifar-lit fit --help` lists them, `cifar-lit fit --recipe NAME --print_config` prints them as YAML.
Recipes are weaker than --config files, and these are weaker than flags.
"""

# Commands that are not the Trainer's: the function that takes the arguments after the name, and may return an exit code.
OWN = {
    "recipes": "cifar_lit.cli.recipes:list_recipes",
    "devices": "cifar_lit.cli.devices:list_devices",
    "bench": "cifar_lit.bench.commands:bench",
    "preview": "cifar_lit.cli.preview:preview",
    "classify": "cifar_lit.cli.classify:classify",
    "report": "cifar_lit.cli.report:report",
    "compare": "cifar_lit.cli.compare:compare",
    "export": "cifar_lit.cli.export:export",
    "serve": "cifar_lit.cli.serve:serve",
}


_SYNONYMS = {  # commands of other programs
    **dict.fromkeys(("run", "start", "training"), "train"),
    **dict.fromkeys(("eval", "evaluate", "score"), "test"),
    **dict.fromkeys(("infer", "inference", "detect", "label"), "classify"),
    **dict.fromkeys(("val", "valid"), "validate"),
    **dict.fromkeys(("convert", "onnx"), "export"),
    **dict.fromkeys(("benchmark", "speed"), "bench"),
    "list": "recipes",
}


def main(argv: list[str] | None = None, default: str = "fit") -> int:
    """Runs a command line; what goes wrong is one line on stderr, with --debug after its traceback.

    Args:
        argv: without the program's name; this process's own if not given.
        default: the command when none is named.

    Returns:
        The exit code: 0, 2 for what was typed, 1 for what failed, 128 and the signal's number for an interruption.
    """
    argv = sys.argv[1:] if argv is None else argv
    guard_child_processes()
    limit_busy_waiting()
    try:
        return _run(argv, default)
    except BaseException as error:
        if not isinstance(error, (SystemExit, Exception, KeyboardInterrupt)) and not hasattr(error, "exit_code"):
            raise
        return _report(error, "--debug" in argv)


def _run(argv: list[str], default: str) -> int:
    if (default == "fit" and not argv) or argv[:1] in (["--help"], ["-h"], ["help"]):
        say(*OVERVIEW.splitlines())
        return 0
    if argv[:1] == ["--version"]:
        from cifar_lit import __version__

        say(f"cifar-lit {__version__}")
        return 0
    name, rest = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else (default, argv)
    if name in flags.TRAINING:
        _train(flags.parse(name, rest), rest)
        return 0
    if name not in OWN:
        known = [*flags.TRAINING, *OWN]
        raise UsageError(f"no command is called {name!r}.{_command_hint(name, known)} There are {', '.join(known)}.")
    trusted = "--trust" in rest and name != "bench"  # which hands its flags on
    _allow_runs(rest, trusted)
    module, _, function = OWN[name].partition(":")
    with all_imports_allowed() if trusted else nullcontext():
        code: int | None = getattr(import_module(module), function)([word for word in rest if word != "--debug"])
    return code or 0


def _command_hint(name: str, known: list[str]) -> str:
    """Return `" Did you mean X?"` for an unknown command, which may be a recipe or a command of another program."""
    if name in flags.recipe_names():
        return f" Did you mean train --recipe {name}?"
    if synonym := _SYNONYMS.get(name.lower()):
        return f" Did you mean {synonym}?"
    return nearest(name, known)


def _allow_runs(argv: list[str], trusted: bool) -> None:
    """Lets the runs on a line name nets, data sets and places: those that this user has trained, or all that are trusted."""
    for word in argv:
        with suppress(UsageError, OSError):  # a config.yaml that is none of ours, a word that can be no path
            path = Path(word)
            config = (path if path.is_dir() else path.parent) / "config.yaml"
            if path.exists() and config.is_file():
                from cifar_lit.cli.trust import allow_run

                allow_run(config, trusted)


def _train(command: flags.Command, argv: list[str]) -> None:
    """Runs fit, train, validate, test or predict, as one of the processes that a launcher may have started."""
    from cifar_lit.cli.launch import apply_launcher, continue_job
    from cifar_lit.distributed.join import leave, meet_anew

    if command.recipe:
        flags.recipe_path(command.recipe)  # a typing error is answered before seconds of imports
    apply_launcher(command, os.environ)
    from cifar_lit.cli.quiet import catch_signals, hold_signals, quieten

    hold_signals()
    quieten()
    meet_anew(os.environ)
    continue_job(command, argv, os.environ)
    catch_signals()
    if command.folds is None:
        from cifar_lit.cli.fit import TrainingCLI

        TrainingCLI(command)
    else:
        from cifar_lit.cli.folds import train_folds

        train_folds(command)
    leave("", 0)


def _report(error: BaseException, debug: bool) -> int:
    """Prints what went wrong and returns the exit code."""
    for number in STOP_SIGNALS:  # nothing is left to save: a signal that arrives now ends the process quietly
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler):
            signal.signal(number, signal.SIG_DFL)
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    from cifar_lit.cli.errors import explain_error, is_lost_peer
    from cifar_lit.distributed.join import leave

    if debug:
        import traceback

        note(*"".join(traceback.format_exception(error)).splitlines())
    line, code = explain_error(error)
    line = leave(line, code, is_lost_peer(error))
    if getattr(error, "requeue", False):
        from cifar_lit.distributed.job import requeue

        line = requeue(os.environ, getattr(error, "resume", None))
    if line:
        note(*line.split("\n"))
    return code
