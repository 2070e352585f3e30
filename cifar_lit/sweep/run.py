"""Run a sweep: open its study, run its trials, confirm the best one and write the results."""

from __future__ import annotations

import argparse
import json
import logging
import math
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import MedianPruner, NopPruner
from optuna.samplers import BaseSampler, PartialFixedSampler, RandomSampler, TPESampler
from optuna.trial import FixedTrial, FrozenTrial, Trial, TrialState
from rich.table import Table

from cifar_lit.bench.process import without_places
from cifar_lit.cli.console import for_tables
from cifar_lit.cli.fit import program
from cifar_lit.cli.flags import recipe_path
from cifar_lit.errors import Failure, UsageError
from cifar_lit.files import DISK_FULL, read_text
from cifar_lit.runs.config_file import plain_values
from cifar_lit.runs.run_folder import check_links, display_path
from cifar_lit.signals import HANGUP, accept_hangup, stop_signals
from cifar_lit.sweep.check import check_sweep, devices_of_workers, nested
from cifar_lit.sweep.database import database_url, open_storage, open_study, storage_errors
from cifar_lit.sweep.results import conclusion, ranked, rows_of, text, write_results
from cifar_lit.sweep.space import SweepFile, read_sweep
from cifar_lit.sweep.trials import Control, Job, run_job
from cifar_lit.text import note, say
from cifar_lit.training.orderly_stop import Interrupted

BEST = 10  # rows of the printed table
VAL_SIZE = 0.1  # fraction of the training images, if the recipe validates on none


def run_sweep(options: argparse.Namespace, words: list[str], argv: list[str]) -> None:
    """Run a sweep, or what is left of it. words: flags of `fit` for every trial. argv: all arguments as typed."""
    warnings.filterwarnings("ignore", category=ExperimentalWarning)
    warnings.filterwarnings("ignore", message="Heartbeat of storage")  # sent by our workers
    optuna.logging.set_verbosity(logging.CRITICAL)
    file = read_sweep(options.file)
    fixed = ["--recipe", file.recipe, *words]
    if options.trust:
        fixed.append("--trust")
    base = check_sweep(file, fixed, words)
    workers = devices_of_workers(options.workers, base)
    if base.data.val_size == 0:
        fixed.append(f"--data.val_size={VAL_SIZE}")
    folder = options.logs.expanduser() / file.name
    if (folder / "config.yaml").exists() or folder.is_symlink():
        raise UsageError(f"{folder} is a run or a symlink: give the sweep another name (name: …)")
    check_links(folder)
    url = database_url(options.storage, folder)
    grid = file.grid() if file.sampler == "grid" else []
    if options.storage is None:
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with storage_errors(url):
            storage = open_storage(url)
            folder.mkdir(parents=True, exist_ok=True)
            pruner = MedianPruner() if file.pruner == "median" else NopPruner()
            study = open_study(storage, file.name, [*file.objectives.values()], pruner)
            _check_same(study, options.file, recipe_path(file.recipe), fixed, folder)
            if base.data.val_size == 0:
                say(f"validation on {VAL_SIZE:.0%} of the training images, as {file.recipe} has data.val_size 0")
            control = Control(file.seconds, time.monotonic() - study.user_attrs.get("seconds", 0))
            _catch_signals(control)

            def settings(trial: Trial) -> dict[str, Any]:
                trial.study.sampler = _sampler(file, grid, trial.number)
                return {**file.settings, **file.suggest(trial)}

            count = min(file.trials, len(grid) or math.inf)
            job = Job(study, storage, folder / "trial", count, settings, lambda trial: fixed, [*file.objectives],
                      lambda trial: _report(job, trial), workers, control)  # fmt: skip
            run_job(job)
            sentences = _finish(options.confirm, file, base, fixed, job)
    except Interrupted as interruption:
        hidden = url.render_as_string()  # without the password
        shown = [word.replace(options.storage or hidden, hidden) for word in argv]
        interruption.resume = f"{program(sys.argv[0], 'sweep')} {shlex.join(shown)}"
        raise
    except OSError as error:
        if error.errno in DISK_FULL:
            raise
        reason = f"cannot write {error.filename or folder}: {error.strerror}"
        raise Failure(f"{reason}. Move it away, then repeat the command: the sweep continues.") from error
    say(*sentences, f"results {display_path(folder)}/sweep.html")
    say(f"next: cifar-lit train --recipe {shlex.join([display_path(folder / 'best.yaml'), *words])}")


def _check_same(study: optuna.Study, file: Path, recipe: Path, fixed: Sequence[str], folder: Path) -> None:
    """Record the settings of a new sweep. Raise UsageError if an existing one of this name has others.

    Args:
        file: the sweep file.
        recipe: the file of the starting recipe.
        fixed: flags of all trials.
        folder: folder of the sweep.
    """
    record = {key: value for key, value in plain_values(file).items() if key not in ("name", "trials", "time")}
    record |= {"flags": without_places(fixed), "recipe file": sha256(read_text(recipe).encode()).hexdigest()}
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


def _catch_signals(control: Control) -> None:
    """Make a stop signal end the trainings in order. A second one kills them."""

    def stop(number: int, frame: object) -> None:
        if number == HANGUP:
            accept_hangup()
        elif not control.signals:
            note("", "stopping: each training writes a checkpoint; press Ctrl-C again to stop immediately")
        control.signals.append(number)

    for number in stop_signals():
        signal.signal(number, stop)


def _sampler(file: SweepFile, grid: Sequence[Mapping[str, Any]], number: int) -> BaseSampler:
    """Return the sampler of a trial. A seed per trial keeps continued and joined sweeps from repeating draws."""
    if grid:
        return PartialFixedSampler(dict(grid[number]), RandomSampler())
    seed = (1_000_003 * file.seed + number) % (1 << 32)
    return RandomSampler(seed) if file.sampler == "random" else TPESampler(seed=seed, constant_liar=True)


def _report(job: Job, trial: FrozenTrial) -> None:
    """Print the line of a finished trial."""
    trials = job.trials()
    finished = sum(each.state.is_finished() for each in trials)
    results = [f"{name} {text(value)}" for name, value in zip(job.objectives, trial.values or (), strict=False)]
    if trial.state != TrialState.COMPLETE:
        results.insert(0, f"failed: {trial.user_attrs['error']}" if trial.user_attrs["error"] else "pruned")
    if best := ranked(job.study, trials):
        results.append(f"best {text(best[0].values[0])} (trial {best[0].number})")
    of = "" if job.count == math.inf else f" of {job.count}"
    parameters = [f"{name} {text(value)}" for name, value in trial.params.items()]
    say(f"trial {trial.number} ({finished}{of}): {' · '.join(parameters)} → {' · '.join(results)}")


def _finish(seeds: int, file: SweepFile, base: Any, fixed: Sequence[str], job: Job) -> list[str]:
    """Print the best trials, confirm the first of them with new seeds, and write the results. Return the conclusions.

    Args:
        seeds: number of new seeds, which may be 0.
        base: settings of the starting recipe.
        fixed: flags of all trials.
    """
    folder, objective = job.folder.parent, job.objectives[0]
    best = ranked(job.study, job.trials())
    if not best:
        raise Failure(f"no trial of {display_path(folder)} is complete: raise trials or time, or see trial-*/")
    settings = file.suggest(FixedTrial(best[0].params))
    recipe = nested({**file.settings, **settings}, plain_values(recipe_path(file.recipe)) or {})
    sentences = [f"Best of {len(job.trials())} trials: {best[0].number}, {objective} {text(best[0].values[0])}"]
    rows = [
        {name: value for name, value in row.items() if name not in ("state", "error")}
        for row in rows_of(best[:BEST], job.objectives)
    ]
    write_results(folder, job, rows, recipe, sentences)
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(text, row.values()))
    for_tables().print(table)
    if seeds:
        first = 1 + max(int(base.seed_everything or 0), int(settings.get("seed_everything", 0)))
        variants = [file.settings, {**file.settings, **settings}]
        sentences.append(_confirm(range(first, first + seeds), file, best[0].number, variants, fixed, job))
        write_results(folder, job, rows, recipe, sentences)
    return sentences


def _confirm(
    seeds: range, file: SweepFile, best: int, variants: Sequence[Mapping[str, Any]], fixed: Sequence[str], job: Job
) -> str:
    """Train the starting recipe and the best trial with new seeds; return a sentence about the difference.

    This is a study of its own, whose trials have even numbers for the recipe and odd ones for the best trial.

    Args:
        best: number of the best trial.
        variants: settings of the recipe's trainings, and of those with the settings of the best trial.
        fixed: flags of all trainings.
    """
    objective, count = job.objectives[0], 2 * len(seeds)
    study = open_study(job.storage, f"{file.name} confirm {best}", [file.objectives[objective]], NopPruner())

    def flags(trial: Trial) -> list[str]:
        return [*fixed, f"--seed_everything={seeds[trial.number // 2]}"]

    def report(trial: FrozenTrial) -> None:
        side = (file.recipe, f"trial {best}")[trial.number % 2]
        result = trial.user_attrs["error"] or f"{objective} {text(trial.values[0])}"
        say(f"confirmation, seed {seeds[trial.number // 2]}, {side}: {result}")

    again = replace(
        job,
        study=study,
        folder=job.folder.with_name(f"confirm-{best:03}"),
        count=count,
        settings=lambda trial: variants[trial.number % 2],
        flags=flags,
        objectives=[objective],
        report=report,
        control=replace(job.control, seconds=math.inf, outcomes=[]),
    )
    if len(study.trials) < count:
        say(f"confirming trial {best} with {len(seeds)} new seeds: {count} trainings (--confirm {len(seeds)})")
    run_job(again)
    values = {trial.number: trial.values[0] for trial in again.trials() if trial.state == TrialState.COMPLETE}
    gains = [values[odd] - values[odd - 1] for odd in range(1, count, 2) if {odd - 1, odd} <= {*values}]
    return conclusion(objective, file.objectives[objective] == "maximize", gains, count - len(values))
