"""Run a sweep: open its study, run its trials, write the results, and confirm the best trial."""

from __future__ import annotations

import argparse
import csv
import logging
import shlex
import signal
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Any

import matplotlib
import optuna
import yaml
from jsonargparse import Namespace
from matplotlib import pyplot
from optuna.trial import FrozenTrial, TrialState
from optuna.visualization import matplotlib as plots
from rich.table import Table
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from cifar_lit import hardware
from cifar_lit.bench.process import without_places
from cifar_lit.cli.compare import compare
from cifar_lit.cli.console import for_tables
from cifar_lit.cli.fit import program
from cifar_lit.cli.flags import drop_replaced_options, parse, recipe_path
from cifar_lit.cli.quiet import catch_signals
from cifar_lit.cli.several import train_in_processes
from cifar_lit.errors import Failure, UsageError, first_line
from cifar_lit.extras.sweep.file import SweepFile, nested
from cifar_lit.extras.sweep.trials import Trials, first_number, open_study, text
from cifar_lit.files import atomic_write, write_text
from cifar_lit.runs.config_file import plain_values
from cifar_lit.runs.run_folder import check_links, display_path, read_json
from cifar_lit.signals import HANGUP, accept_hangup, stop_signals
from cifar_lit.text import csv_cell, say
from cifar_lit.training.orderly_stop import Interrupted

VAL_SIZE = 0.1  # fraction of the training images, if the recipe validates on none
BEST = 10  # rows of the printed table


def run_sweep(options: argparse.Namespace, typed: list[str], argv: list[str]) -> None:
    """Run a sweep, or what is left of it. typed: flags of `fit` for every trial. argv: all arguments as typed."""
    warnings.simplefilter("ignore")  # Optuna warns about experimental functions
    optuna.logging.set_verbosity(logging.CRITICAL)
    file = SweepFile(options.file)
    words = [*typed]
    if options.trust:
        words.append("--trust")
    base = file.check(words)
    workers = devices_of_workers(options.workers, base.trainer)
    if base.data.val_size == 0:
        say(f"validation on {VAL_SIZE:.0%} of the training images, as {file.recipe} has data.val_size 0")
        words.append(f"--data.val_size={VAL_SIZE}")
    folder = options.logs.expanduser() / file.name
    if (folder / "config.yaml").exists() or folder.is_symlink():
        raise UsageError(f"{folder} is a run or a symlink: give the sweep another name (name: …)")
    check_links(folder)
    url = database_url(options.storage, folder)
    grid: list[dict[str, object]] = []
    count = file.trials
    if file.sampler == "grid":
        grid = file.grid()
        count = len(grid)
    try:
        if options.storage is None:
            folder.mkdir(parents=True, exist_ok=True)
        study = open_study(url, file, options.grace, grid)
        check_same(study, options.file, recipe_path(file.recipe), words, folder)
        trials = Trials(file, study, folder, count, ["--recipe", file.recipe, *words], workers)

        def stop(number: int, frame: object) -> None:
            """Stop the trainings in order; a second signal kills them."""
            if number == HANGUP:
                accept_hangup()
            trials.signals.append(number)

        for number in stop_signals():
            signal.signal(number, stop)
        trials.run(options.grace)
        catch_signals()
        if trials.signals:
            raise Interrupted(trials.signals[0])
        best, settings = write_results(trials)
        if options.confirm:
            seed = int(base.seed_everything or 0)
            confirm(trials, best, settings, seed=seed, words=words, count=options.confirm)
    except Interrupted as interruption:
        line = shlex.join(argv)
        if options.storage:  # without the password
            line = shlex.join(word.replace(options.storage, url.render_as_string()) for word in argv)
        interruption.resume = f"{program('sweep')} {line}"
        raise
    except (UsageError, Failure, OSError):
        raise
    except Exception as error:  # from the database, or from wrong types and values in its rows
        cause = error.__cause__ or error
        line = first_line(getattr(cause, "orig", None) or cause)
        if url.password:
            line = line.replace(str(url.password), "***")
        remedy = "Fix that and repeat the command, or give the sweep another name (name: …)."
        raise Failure(f"{file.name} in the database {url.render_as_string()}: {line}. {remedy}") from error
    say(f"next: cifar-lit train --recipe {shlex.join([display_path(folder / 'best.yaml'), *typed])}")


def devices_of_workers(workers: str, trainer: Namespace) -> list[list[str]]:
    """Return further flags for each worker. workers: a number, or ids of GPUs, as typed."""
    machine = hardware.detect_machine()
    hardware.choose_devices(machine, trainer.accelerator, trainer.devices)
    try:
        accelerator, devices = hardware.choose_devices(machine, trainer.accelerator, workers)
    except UsageError as error:
        raise UsageError(str(error).replace("--devices", "--workers")) from None
    if isinstance(devices, list):
        ids = devices
    else:
        ids = list(range(hardware.count_devices(machine, accelerator, devices)))
        if len(ids) == 1 or machine.kind(accelerator) != "gpu":
            return [[]] * len(ids)
    if trainer.devices != "auto":
        raise UsageError(f"--workers {workers} gives each worker one GPU: leave --devices out")
    return [[f"--trainer.devices=[{device}]"] for device in ids]


def database_url(storage: str | None, folder: Path) -> URL:
    """Return the URL of a database, by default a file in the sweep's folder; raise UsageError if it is invalid."""
    try:
        url = URL.create("sqlite", database=str(folder / "sweep.db"))
        if storage:
            url = make_url(storage)
        if url.drivername == "postgresql":
            url = url.set(drivername="postgresql+psycopg")
        url.get_dialect().import_dbapi()
    except (ArgumentError, ValueError):
        raise UsageError("--storage is not the URL of a database, such as postgresql://user@host/name") from None
    except ImportError as error:
        raise Failure(f"--storage needs a missing package ({error.name}): install it") from None
    if "password" in url.query or url.database in (None, "", ":memory:"):  # SQLAlchemy would print the password
        raise UsageError("--storage names a database that workers can share; its password is in ~/.pgpass")
    return url


def check_same(study: optuna.Study, path: Path, recipe: Path, words: list[str], folder: Path) -> None:
    """Record the settings of a new sweep. Raise UsageError if an existing one of this name has others."""
    content = {**plain_values(path), "flags": without_places(words), "recipe file": plain_values(recipe)}
    record = {key: str(value) for key, value in content.items() if key not in ("name", "trials", "time")}
    earlier = study.user_attrs.get("sweep")
    if earlier is None:
        earlier = {} if any(folder.glob("trial-*")) else record
    for key in {**record, **earlier}:
        if record.get(key) != earlier.get(key):
            reason = f"{display_path(folder)} is a sweep with another value of {key}"
            raise UsageError(f"{reason}: restore it, or give this sweep a name of its own (name: …)")
    study.set_user_attr("sweep", record)


def write_results(trials: Trials) -> tuple[int, dict[str, object]]:
    """Print the best trials; write trials.csv, best.yaml and the plots. Return number and settings of the best one."""
    file, folder, study = trials.file, trials.folder, trials.study
    ranked = study.get_trials(states=(TrialState.COMPLETE,))
    if len(file.objectives) > 1:
        ranked = study.best_trials
    if not ranked:
        raise Failure(f"no trial of {display_path(folder)} is complete: raise trials or time, or see trial-*/")
    (objective, direction), *_ = file.objectives.items()
    ranked.sort(key=lambda trial: trial.values[0], reverse=direction == "maximize")
    names = [parameter.name for parameter in file.parameters]
    columns = ["trial", "state", *file.objectives, *names, "run", "error"]

    def row(trial: FrozenTrial) -> list[object]:
        values = trial.values or [None] * len(file.objectives)
        attributes = [trial.user_attrs.get(name) for name in ("run", "error")]
        return [first_number(trial), trial.state.name.lower(), *values, *map(trial.params.get, names), *attributes]

    with atomic_write(folder / "trials.csv") as part, part.open("w", newline="", encoding="utf-8") as table:
        writer = csv.writer(table)
        writer.writerow(columns)
        for trial in trials.latest():
            writer.writerow(map(csv_cell, row(trial)))
    printed = Table(*columns)
    for trial in ranked[:BEST]:
        printed.add_row(*map(text, row(trial)))
    for_tables().print(printed)
    best = ranked[0]
    sentence = f"Best of {len(trials.latest())} trials: {first_number(best)}, {objective} {text(best.values[0])}"
    settings = {**file.settings, **file.suggest(best)}
    write_recipe(folder / "best.yaml", file.recipe, settings, f"# {sentence}\n")
    drawers: dict[str, Callable[[optuna.Study], object]] = {"pareto-front": plots.plot_pareto_front}
    if len(file.objectives) == 1:
        drawers = {"history": plots.plot_optimization_history, "slice": plots.plot_slice}
        drawers["importance"] = plots.plot_param_importances
    for name, draw in drawers.items():
        with matplotlib.rc_context({"backend": "agg", "text.parse_math": False}), suppress(ValueError, RuntimeError):
            draw(study)  # raises these errors for too few trials, or if all are equal
            with atomic_write(folder / f"{name}.png") as part:
                pyplot.gcf().savefig(part, format="png", bbox_inches="tight")
        pyplot.close("all")
    say(sentence, f"results {display_path(folder)}")
    return first_number(best), settings


def write_recipe(path: Path, recipe: str, settings: Mapping[str, object], head: str = "") -> None:
    """Write a recipe with further settings by dotted name."""
    content = plain_values(recipe_path(recipe)) or {}
    drop_replaced_options([content, nested(settings, {})], {})
    content = nested(settings, content)
    write_text(path, head + yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def confirm(trials: Trials, best: int, settings: Mapping[str, Any], *, seed: int, words: list[str], count: int) -> None:
    """Train and test the starting recipe and the best trial with `count` new seeds, and compare them.

    best, settings: number of the best trial, and its settings by dotted name. seed: that of the starting recipe.
    """
    file = trials.file
    first = 1 + max(seed, int(settings.get("seed_everything", 0)))
    seeds = f"{first}-{first + count - 1}"
    say(f"confirming trial {best} with {count} new seeds: {2 * count} trainings (--confirm {count})")
    flags = [*parse("fit", words).without("seed_everything")]
    if "--trust" in words:
        flags.append("--trust")
    runs: list[str] = []
    for name, values in (("start", file.settings), (f"trial-{best:03}", settings)):
        logs = trials.folder / "confirm" / f"{name}-seeds-{seeds}"
        logs.mkdir(parents=True, exist_ok=True)
        write_recipe(logs / f"{name}.yaml", file.recipe, values)
        if not any("runs" in read_json(record) for record in logs.glob("*/seeds.json")):
            train_in_processes(["--recipe", str(logs / f"{name}.yaml"), *flags, f"--logs={logs}", "--seeds", seeds])
        runs.insert(0, f"{escape(str(logs))}/*/*")
    compare(runs)
