"""`cifar-lit drill NAME`: what could lose work, done on purpose."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from cifar_lit.errors import UsageError, nearest

DRILLS = {
    "kill": "trainings killed at random moments and resumed; survivors compared with undisturbed ones",
    "ranks": "one of two processes crashes, is killed, frozen or cut off: the run must end soon, and go on",
    "checkpoint": "checkpoints cut and flipped at every kind of place: none may be loaded",
    "exact": "one checkpoint scored on 1, 2 and 3 processes, sets of every size: equal to the last digit",
    "soak": "hundreds of short epochs: memory, open files and disk must stay flat",
}


def drill(words: list[str]) -> None:
    """Runs the drill that is named first; raises UsageError for what is none, Failure when it finds something."""
    if not words or words[0] in ("-h", "--help"):
        print("usage: cifar-lit drill NAME [--short] [flags]\n")
        for name, what in DRILLS.items():
            print(f"  {name:<10} {what}")
        print("\n--short takes seconds; --json FILE writes the figures. `cifar-lit drill NAME --help` lists the flags of each.")
        return
    name, rest = words[0], words[1:]
    if name not in DRILLS:
        raise UsageError(f"no drill is called {name!r}.{nearest(name, DRILLS)} There are {', '.join(DRILLS)}.")
    from cifar_lit.cli.quiet import quieten

    quieten()
    from jsonargparse import ArgumentParser

    from cifar_lit.bench.report import make_room
    from cifar_lit.cli.errors import parsed

    module = import_module(f"cifar_lit.drills.{name}")
    parser = ArgumentParser(prog=f"cifar-lit drill {name}", description=module.WHAT, exit_on_error=False, allow_abbrev=False)
    module.add_arguments(parser)
    if "--short" in rest:
        parser.set_defaults(module.SHORT)
    text = ", ".join(f"--{setting} {value}" for setting, value in module.SHORT.items())
    parser.add_argument("--short", action="store_true", help=f"a form that takes seconds: {text}")
    parser.add_argument("--json", type=str | None, default=None, help="write the figures to this file too")
    settings = parsed(parser, rest)
    if settings.json:
        make_room(Path(settings.json))  # rather now than when all is done
    module.run(settings)
