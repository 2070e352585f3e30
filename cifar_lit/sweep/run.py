"""Run a sweep: open its study, run its trials, write the results, and confirm the best trial."""

from __future__ import annotations

import argparse
import csv
import json
import logging
import math
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import matplotlib
import optuna
import yaml
from matplotlib import pyplot
from optuna.exceptions import DuplicatedStudyError, ExperimentalWarning, StorageInternalError
from optuna.pruners import MedianPruner, NopPruner
from optuna.samplers import RandomSampler, TPESampler
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.trial import FixedTrial, TrialState
from optuna.visualization import matplotlib as plots
from rich.table import Table
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from cifar_lit.bench.process import without_places
from cifar_lit.cli.compare import compare
from cifar_lit.cli.console import for_tables
from cifar_lit.cli.fit import program
from cifar_lit.cli.flags import parse, recipe_path
from cifar_lit.cli.quiet import catch_signals
from cifar_lit.cli.several import train_in_processes
from cifar_lit.errors import Failure, UsageError, first_line
from cifar_lit.files import atomic_write, check_database, read_text, write_text
from cifar_lit.runs.config_file import plain_values
from cifar_lit.runs.run_folder import check_links, display_path, read_json
from cifar_lit.signals import HANGUP, accept_hangup, stop_signals
from cifar_lit.sweep.check import check_sweep, devices_of_workers, nested
from cifar_lit.sweep.space import SweepFile, read_sweep
from cifar_lit.sweep.trials import MAX_RETRIES, Trials, text
from cifar_lit.text import csv_cell, note, say
from cifar_lit.training.orderly_stop import Interrupted

VAL_SIZE = 0.1  # fraction of the training images, if the recipe validates on none
BEST = 10  # rows of the printed table


def run_sweep(options: argparse.Namespace, words: list[str], argv: list[str]) -> None:
    """Run a sweep, or what is left of it. words: flags of `fit` for every trial. argv: all arguments as typed."""
    warnings.filterwarnings("ignore", category=ExperimentalWarning)
    optuna.logging.set_verbosity(logging.CRITICAL)
    file = read_sweep(options.file)
    typed, words = words, [*words, *(["--trust"] if options.trust else [])]
    base = check_sweep(file, words)
    workers = devices_of_workers(options.workers, base)
    if base.data.val_size == 0:
        words.append(f"--data.val_size={VAL_SIZE}")
    folder = options.logs.expanduser() / file.name
    if (folder / "config.yaml").exists() or folder.is_symlink():
        raise UsageError(f"{folder} is a run or a symlink: give the sweep another name (name: …)")
    check_links(folder)
    url = database_url(options.storage, folder)
    grid = file.grid() if file.sampler == "grid" else []
    try:
        if options.storage is None:
            folder.mkdir(parents=True, exist_ok=True)
        storage, study, is_new = open_study(url, file, options.grace)
        folder.mkdir(parents=True, exist_ok=True)
        check_same(study, options.file, recipe_path(file.recipe), words, folder)
        if base.data.val_size == 0:
            say(f"validation on {VAL_SIZE:.0%} of the training images, as {file.recipe} has data.val_size 0")
        count = min(file.trials, len(grid) or math.inf)
        trials = Trials(file, study, folder, count, ["--recipe", file.recipe, *words], workers)
        if not is_new and len(trials.latest()) < len(grid):
            time.sleep(options.grace)  # another command may be enqueuing them
        for parameters in grid[len(trials.latest()) :]:
            study.enqueue_trial(parameters)
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            # A worker that was killed before its first heartbeat would never be lost.
            study_id = storage.get_study_id_from_name(file.name)
            storage.record_heartbeat(storage.get_trial_id_from_study_id_trial_number(study_id, trial.number))
        catch_stop_signals(trials.signals)
        trials.run(options.grace)
        catch_signals()
        if trials.signals:
            raise Interrupted(trials.signals[0])
        best, settings = write_results(trials)
        if options.confirm:
            confirm(trials, best, settings, base, words, options.confirm)
        say(f"next: cifar-lit train --recipe {shlex.join([display_path(folder / 'best.yaml'), *typed])}")
    except Interrupted as interruption:
        hidden = url.render_as_string()  # without the password
        shown = [word.replace(options.storage or hidden, hidden) for word in argv]
        interruption.resume = f"{program(sys.argv[0], 'sweep')} {shlex.join(shown)}"
        raise
    except (SQLAlchemyError, StorageInternalError) as error:
        cause: Any = error.__cause__ if isinstance(error, StorageInternalError) else error
        line = first_line(getattr(cause, "orig", None) or cause).replace(url.password or "\0", "***")
        place = f"the database at {url.host}" if url.host else url.database
        raise Failure(f"{place}: {line}. Fix that, then repeat the command: the sweep continues.") from None
    except (UsageError, Failure, OSError):
        raise
    except Exception as error:  # wrong types or values in the rows of a database can raise any error
        remedy = "restore it, or give this sweep a name of its own (name: …)"
        raise Failure(f"the sweep {file.name} in the database is damaged ({first_line(error)}): {remedy}") from error


def database_url(storage: str | None, folder: Path) -> URL:
    """Return the URL of a database, by default a file in the sweep's folder; raise UsageError if it is invalid."""
    if storage is None:
        return URL.create("sqlite", database=str(folder / "sweep.db"))
    try:
        url = make_url(storage)
        url = url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url
        url.get_dialect().import_dbapi()
    except (ArgumentError, ValueError):
        raise UsageError("--storage is not the URL of a database, such as postgresql://user@host/name") from None
    except ImportError as error:
        raise Failure(f"--storage needs a missing package ({error.name}): install it") from None
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise UsageError("--storage is not the URL of a database that workers can share")
    if "password" in url.query:  # SQLAlchemy would print it
        raise UsageError("--storage: put the password into ~/.pgpass, not behind a question mark")
    return url


def open_study(url: URL, file: SweepFile, grace: int) -> tuple[RDBStorage, optuna.Study, bool]:
    """Connect to a database; create or load the study. Return both, and whether the study is new.

    Raise an error of any type if its rows are not those of this sweep: Optuna does not check them.
    """
    options: dict[str, Any] = {}
    if url.get_backend_name() == "sqlite":
        check_database(Path(str(url.database)).resolve())
        options = {"timeout": 60}  # seconds, while another process writes to the file
    if url.get_backend_name() == "postgresql":
        options = {"connect_timeout": 10, "tcp_user_timeout": 30_000}  # seconds, milliseconds
    storage = RDBStorage(
        url.render_as_string(hide_password=False),
        {"connect_args": options, "pool_pre_ping": True},
        heartbeat_interval=max(1, grace // 6),
        grace_period=grace,
        heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(max_retry=MAX_RETRIES),
    )
    directions = [*file.objectives.values()]
    try:
        study, is_new = optuna.create_study(storage=storage, study_name=file.name, directions=directions), True
    except DuplicatedStudyError:
        study, is_new = optuna.load_study(storage=storage, study_name=file.name), False
    trials = study.get_trials()
    # Each command draws other values. Of two that begin at the same moment, one has no seed.
    seed = (1_000_003 * file.seed + len(trials)) % (1 << 32) if is_new or trials else None
    study.sampler = TPESampler(seed=seed, constant_liar=True) if file.sampler == "tpe" else RandomSampler(seed)
    study.pruner = MedianPruner() if file.pruner == "median" else NopPruner()
    if [direction.name.lower() for direction in study.directions] != directions:
        raise ValueError("its objectives have other directions")
    for trial in trials:
        if trial.state == TrialState.COMPLETE:
            file.suggest(trial)
            if len(trial.values) != len(directions) or not all(map(math.isfinite, trial.values)):
                raise ValueError(f"trial {trial.number} is complete without finite values")
    return storage, study, is_new


def check_same(study: optuna.Study, path: Path, recipe: Path, words: Sequence[str], folder: Path) -> None:
    """Record the settings of a new sweep. Raise UsageError if an existing one of this name has others."""
    record = {key: value for key, value in plain_values(path).items() if key not in ("name", "trials", "time")}
    record |= {"flags": without_places(words), "recipe file": sha256(read_text(recipe).encode()).hexdigest()}
    record = json.loads(json.dumps(record, default=str))
    has_trials = any(folder.glob("trial-*"))  # before the record is read, which other commands write before trials
    earlier = study.user_attrs.get("sweep")
    if earlier is None and (has_trials or study.trials):
        place = display_path(folder) if has_trials else "the database"
        raise UsageError(f"{place} has trials of another {study.study_name}: give this sweep a name (name: …)")
    if earlier is None:
        study.set_user_attr("sweep", record)
    elif changed := [key for key in {**record, **earlier} if record.get(key) != earlier.get(key)]:
        reason = f"{display_path(folder)} is a sweep with another value of {changed[0]}"
        raise UsageError(f"{reason}: restore it, or give this sweep a name of its own (name: …)")


def catch_stop_signals(signals: list[int]) -> None:
    """Append stop signals to a list. The first one stops the trainings in order, a second one kills them."""

    def stop(number: int, frame: object) -> None:
        if number == HANGUP:
            accept_hangup()
        elif not signals:
            note("", "stopping: each training writes a checkpoint; press Ctrl-C again to stop immediately")
        signals.append(number)

    for number in stop_signals():
        signal.signal(number, stop)


def write_results(trials: Trials) -> tuple[int, dict[str, Any]]:
    """Print the best trials; write trials.csv, best.yaml and the plots. Return number and settings of the best one."""
    folder, file, ranked = trials.folder, trials.file, trials.ranked()
    if not ranked:
        raise Failure(f"no trial of {display_path(folder)} is complete: raise trials or time, or see trial-*/")
    rows = trials.rows()
    with atomic_write(folder / "trials.csv") as part, part.open("w", newline="", encoding="utf-8") as table:
        writer = csv.DictWriter(table, [*dict.fromkeys(name for row in rows.values() for name in row)])
        writer.writeheader()
        for row in rows.values():
            writer.writerow({name: csv_cell(value) for name, value in row.items()})
    names = [name for name in writer.fieldnames if name not in ("state", "error")]
    printed = Table(*names)
    for number in ranked[:BEST]:
        printed.add_row(*(text(rows[number].get(name)) for name in names))
    for_tables().print(printed)
    objective, best = next(iter(file.objectives)), trials.latest()[ranked[0]]
    sentence = f"Best of {len(rows)} trials: {ranked[0]}, {objective} {text(best.values[0])}"
    settings = {**file.settings, **file.suggest(FixedTrial(best.params))}
    write_recipe(folder / "best.yaml", file.recipe, settings, f"# {sentence}\n")
    draw(trials.study, folder)
    say(sentence, f"results {display_path(folder)}")
    return ranked[0], settings


def write_recipe(path: Path, recipe: str, settings: Mapping[str, Any], head: str = "") -> None:
    """Write a recipe with further settings by dotted name."""
    content = nested(settings, plain_values(recipe_path(recipe)) or {})
    write_text(path, head + yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def draw(study: optuna.Study, folder: Path) -> None:
    """Write the plots that the trials allow."""
    drawers = {
        "history": plots.plot_optimization_history,
        "importance": plots.plot_param_importances,
        "slice": plots.plot_slice,
    }
    if len(study.directions) > 1:
        drawers = {"pareto-front": plots.plot_pareto_front}
    for name, drawer in drawers.items():
        with matplotlib.rc_context({"backend": "agg", "text.parse_math": False}), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with suppress(ValueError, RuntimeError):  # too few trials, or all are equal
                drawer(study)
                with atomic_write(folder / f"{name}.png") as part:
                    pyplot.gcf().savefig(part, format="png", dpi=110, bbox_inches="tight")
            pyplot.close("all")


def confirm(trials: Trials, best: int, settings: Mapping[str, Any], base: Any, words: list[str], count: int) -> None:
    """Train and test the starting recipe and the best trial with `count` new seeds, and compare them."""
    first = 1 + max(int(base.seed_everything or 0), int(settings.get("seed_everything", 0)))
    seeds = f"{first}-{first + count - 1}"
    say(f"confirming trial {best} with {count} new seeds: {2 * count} trainings (--confirm {count})")
    folder, groups = trials.folder / "confirm", []
    folder.mkdir(exist_ok=True)
    typed = [word for word in parse("fit", words).flags if not word.startswith("--seed_everything=")]
    trusted = ["--trust"] if "--trust" in words else []
    for name, values in (("start", trials.file.settings), (f"trial-{best:03}", settings)):
        recipe = folder / f"{name}.yaml"
        write_recipe(recipe, trials.file.recipe, values)
        flags = ["--recipe", str(recipe), *typed, *trusted, f"--logs={folder}", "--seeds", seeds]
        if not trained(folder, name, seeds):
            train_in_processes(flags)
        groups.append(trained(folder, name, seeds))
    compare(groups[::-1])


def trained(folder: Path, name: str, seeds: str) -> str:
    """Return the folder of the finished trainings of a recipe with these seeds; empty if there is none."""
    for file in folder.glob(f"{name}-seeds-*/seeds.json"):
        record = read_json(file)
        if record.get("seeds") == seeds and "runs" in record:
            return str(file.parent)
    return ""
