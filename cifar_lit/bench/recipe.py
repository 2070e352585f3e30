"""`cifar-lit bench recipe`: recipes trained and tested with many seeds, as means with their intervals, times and memory."""

from __future__ import annotations

import argparse
import re
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cifar_lit.bench.plot import plot
from cifar_lit.bench.process import public
from cifar_lit.bench.records import Records, fingerprint
from cifar_lit.bench.report import environment, footer, make_room
from cifar_lit.bench.summary import percent, print_summary, summary
from cifar_lit.bench.training_run import SHARED, images_held, run_once
from cifar_lit.bench.words import PassingParser
from cifar_lit.cli.console import say
from cifar_lit.cli.flags import LOGS, OWN, SHORT, parse, recipe_path
from cifar_lit.cli.quiet import catch_signals
from cifar_lit.cli.run import program
from cifar_lit.errors import UsageError, nearest
from cifar_lit.files import atomic_write
from cifar_lit.runs.run_folder import display_path
from cifar_lit.training.callbacks import Interrupted

WHAT = "seeds of recipes: test accuracy with its interval, warm and cold time, memory; plots of accuracy against seconds"
CURVE_NOTE = "The curves are of the test images; nothing is chosen by them, and the seconds that they took are not in the times."
UNFIT = {
    "seed": "--seed0 and --runs choose the seeds",
    "seed_everything": "--seed0 and --runs choose the seeds",
    "recipe": "recipes are named without a flag, first on the line",
    "resume": "the same command again goes on by itself",
    "ckpt_path": "every run starts anew",
}


@dataclass
class Wanted:
    """What was asked for: names of recipes (as typed), flags of the measurement, words for training."""

    names: list[str]
    options: argparse.Namespace
    words: list[str]

    @property
    def curve_every(self) -> int | None:
        """Steps between looks at the test accuracy, 0 for epoch ends, None where no curve is needed."""
        o = self.options
        return o.curve_every or 0 if o.curve or o.plot or o.passes or o.curve_every else None

    @property
    def seeds(self) -> list[int]:
        """The seeds of each recipe."""
        return list(range(self.options.seed0, self.options.seed0 + self.options.runs))


def main(words: list[str]) -> None:
    """Runs `bench recipe NAME … [flags]`.

    Raises UsageError, Failure, Interrupted and what a training raises; what is finished by then is kept on disk.
    """
    wanted = understand(words)
    catch_signals()
    where = environment()
    logs = parse("train", wanted.words).logs
    settings = {stem(name): _settings(name, wanted, where) for name in wanted.names}
    records = Records(Path(wanted.options.json) if wanted.options.json else None, Path(logs or LOGS), settings)
    try:
        _train(wanted, records, logs)
        figures = _figures(wanted, records, where)
        if wanted.options.plot:
            with atomic_write(Path(wanted.options.plot)) as file:
                plot(figures, file, wanted.options.x)
        records.finish(figures)
    except Interrupted as interruption:
        interruption.resume = f"{program(sys.argv[0], 'bench recipe')} {shlex.join(words)}"
        raise
    finally:
        records.release()
    say("")
    print_summary(figures)
    say("", SHARED, *([CURVE_NOTE] if wanted.curve_every is not None else []), footer(figures))
    for file in filter(None, (wanted.options.json, wanted.options.plot)):
        say(f"written: {display_path(Path(file))}")


def stem(name: str) -> str:
    """What a recipe is called in tables: its name, or that of its file."""
    return recipe_path(name).stem


# ---- understanding the line


def _parser() -> argparse.ArgumentParser:
    going_on = "A measurement that was stopped goes on when the same line is typed again."
    parser = PassingParser("cifar-lit bench recipe", f"{WHAT}. {going_on}")
    parser.usage = "%(prog)s NAME [NAME …] [flags] [any flag of training]"
    parser.add_argument("--runs", type=int, default=3, help="seeds of each recipe (3)")
    parser.add_argument("--seed0", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--json", metavar="FILE", help="write all figures there; runs that it holds already are not made again")
    parser.add_argument("--plot", metavar="FILE.png", help="draw accuracy against seconds")
    parser.add_argument("--x", choices=("auto", "linear", "log"), default="auto", help="the plot's axis of seconds (auto)")
    parser.add_argument("--curve", action="store_true", help="test at the end of each epoch, with the clock stopped")
    parser.add_argument("--curve-every", type=int, metavar="STEPS", help="and every so many optimizer steps")
    parser.add_argument("--passes", metavar="0.5,0.9", help="when the test accuracy first passes these fractions")
    return parser


def understand(words: list[str]) -> Wanted:
    """Takes a line apart; raises UsageError for what cannot be meant, Failure where results could not be written."""
    parser = _parser()
    if "-h" in words or "--help" in words:
        parser.print_help()
        raise SystemExit(0)
    count = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
    names = words[:count]
    options, rest = parser.parse_known_args(words[count:])
    own = [option.removeprefix("--") for action in parser._actions for option in action.option_strings if option != "-h"]
    _check_flags(rest, own)
    if not names:
        raise UsageError("which recipe? Name one or more first, as in `cifar-lit bench recipe quickstart --runs 3`")
    stems = [stem(name) for name in names]
    if len(set(stems)) < len(stems):
        raise UsageError(f"two of the recipes are called alike: {', '.join(stems)}")
    if options.runs < 1:
        raise UsageError(f"--runs must be at least 1, not {options.runs}")
    if options.seed0 < 0:
        raise UsageError(f"--seed0 must be 0 or more, not {options.seed0}")
    if options.curve_every is not None and options.curve_every < 1:
        raise UsageError(f"--curve-every must be at least 1 step, not {options.curve_every}")
    if options.plot and Path(options.plot).suffix != ".png":
        raise UsageError(f"--plot draws a PNG: name it FILE.png, not {options.plot}")
    for file in filter(None, (options.json, options.plot)):
        make_room(Path(file))
    options.passes = _fractions(options.passes)
    return Wanted(names, options, _on_one_device(rest))


def _fractions(text: str | None) -> list[float]:
    try:
        found = [float(part) for part in (text or "").split(",") if part.strip()]
    except ValueError:
        found = [0.0]
    if not all(0 < value <= 1 for value in found):
        raise UsageError(f"--passes takes accuracies as fractions, such as 0.5,0.9, not {text}")
    return found


def _check_flags(words: Iterable[str], own: Sequence[str]) -> None:
    """Refuses flags that do not fit a measurement, and unknown short ones, of which training does not know the nearest."""
    for word in words:
        name = word.removeprefix("--").partition("=")[0]
        if not word.startswith("--") or "." in name:
            continue
        if name in UNFIT:
            raise UsageError(f"bench recipe takes no --{name}: {UNFIT[name]}")
        known = [*own, *SHORT, *OWN]
        if name not in known:
            raise UsageError(f"there is no flag --{name}.{nearest(name, known).replace('mean ', 'mean --')}")


def _on_one_device(words: list[str]) -> list[str]:
    """The words with one device named: further processes would each start a measurement of their own."""
    asked = parse("train", words).value("trainer.devices")
    if asked is None:
        return [*words, "--devices", "1"]
    if not re.fullmatch(r"1|\d+,|\[\d+,?\]", asked):
        raise UsageError(f"bench recipe measures on one device, not on --devices {asked}: use 1, or name one as [0]")
    return words


def _settings(name: str, wanted: Wanted, where: Mapping[str, Any]) -> dict[str, str]:
    command = parse("train", wanted.words)
    return fingerprint(name, command.flags, command.configs, wanted.curve_every, where)


# ---- training


def _train(wanted: Wanted, records: Records, logs: str | None) -> None:
    """Makes the runs that are not recorded yet, with a line for each."""
    cold = True
    with images_held():
        for name in wanted.names:
            runs = records.runs[stem(name)]
            missing = [seed for seed in wanted.seeds if seed not in runs]
            if runs:
                sources = " and ".join(map(display_path, records.sources))
                say(f"{stem(name)}: {len(runs)} runs are done already (in {sources}); {len(missing)} to go")
            for place, seed in enumerate(missing):
                run = run_once(name, wanted.words, seed, logs, wanted.curve_every, cold)
                run["first"] = place == 0
                cold = False
                records.add(stem(name), run)
                say(_progress(stem(name), run, runs, len(runs) + len(missing) - place - 1))


def _progress(name: str, run: Mapping[str, Any], runs: Mapping[int, Mapping[str, Any]], total: int) -> str:
    accuracies = [other["accuracy"] for other in runs.values()]
    parts = [
        f"{name} seed {run['seed']} ({len(runs)} of {total}): {percent(run['accuracy'])}",
        f"mean {percent(statistics.fmean(accuracies))}",
        f"{run['seconds']:.2f} s",
        f"{run['images_per_second'] or 0:,.0f} images/s",
    ]
    return " · ".join([*parts, *(["the first here: not in the warm times"] if run["first"] else [])])


def _figures(wanted: Wanted, records: Records, where: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that is written and printed."""
    recipes = {}
    for name, runs in records.runs.items():
        in_order = [runs[seed] for seed in sorted(runs)]
        recipes[name] = {**summary(in_order, wanted.options.passes), "settings": records.settings[name], "runs": in_order}
    return {
        "bench": "recipe",
        "settings": {"flags": public(parse("train", wanted.words).flags), "curve_every": wanted.curve_every},
        "environment": dict(where),
        "shared": SHARED,
        "recipes": recipes,
    }
