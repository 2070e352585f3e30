"""Run a sweep: open its study, run its trials, confirm the best one and write the results."""

from __future__ import annotations

import argparse
import json
import logging
import math
import shlex
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, PartialFixedSampler, RandomSampler, TPESampler
from optuna.trial import FixedTrial, FrozenTrial, Trial, TrialState
from rich.table import Table

from cifar_lit.bench.process import without_places
from cifar_lit.cli.console import for_tables
from cifar_lit.cli.fit import program
from cifar_lit.cli.flags import recipe_path
from cifar_lit.errors import Failure, UsageError
from cifar_lit.files import read_text
from cifar_lit.runs.config_file import plain_values
from cifar_lit.runs.run_folder import display_path
from cifar_lit.signals import HANGUP, accept_hangup, stop_signals
from cifar_lit.sweep.check import as_flags, check_sweep, devices_of_workers, nested
from cifar_lit.sweep.database import database_url, open_storage, storage_errors
from cifar_lit.sweep.results import conclusion, ranked, rows_of, text, write_results
from cifar_lit.sweep.space import SweepFile, read_sweep
from cifar_lit.sweep.trials import Control, Job, run_job
from cifar_lit.text import duration_text, note, say
from cifar_lit.training.orderly_stop import Interrupted

VAL_SIZE = 0.1  # fraction of the training images, if the recipe validates on none
BEST = 10  # rows of the printed table


def run_sweep(options: argparse.Namespace, words: list[str], argv: list[str]) -> None:
    """Run a sweep, or what is left of it. words: flags of `fit` for every trial. argv: all arguments as typed."""
    warnings.filterwarnings("ignore", category=ExperimentalWarning)
    warnings.filterwarnings("ignore", message="Heartbeat of storage")  # sent by our workers
    optuna.logging.set_verbosity(logging.CRITICAL)
    file = read_sweep(options.file)
    new = ["--recipe", file.recipe, *(f"--config={config}" for config in file.configs), *as_flags(file.settings)]
    base = check_sweep(file, new, words, options.trust)
    workers = devices_of_workers(options.workers, base)
    typed, words = words, words + ["--trust"] * options.trust
    if base.data.val_size == 0:
        words.append(f"--data.val_size={VAL_SIZE}")
    folder = options.logs.expanduser() / file.name
    if (folder / "config.yaml").exists():
        raise UsageError(f"{folder} is a run: give the sweep another name (name: …)")
    url = database_url(options.storage, folder)
    files = [recipe_path(file.recipe), *(Path(config).expanduser() for config in file.configs)]
    record = {key: value for key, value in plain_values(options.file).items() if key not in ("name", "trials", "time")}
    record |= {
        "flags": without_places(words),
        "recipe file": sha256("\0".join(map(read_text, files)).encode()).hexdigest(),
    }
    grid = file.grid() if file.sampler == "grid" else []
    if options.storage is None:
        folder.mkdir(parents=True, exist_ok=True)
    with storage_errors(url):
        storage = open_storage(url)
        folder.mkdir(parents=True, exist_ok=True)
        pruners = {
            "median": MedianPruner(),
            "hyperband": HyperbandPruner(min_resource=1, max_resource=base.trainer.max_epochs or "auto"),
            "none": NopPruner(),
        }
        study = optuna.create_study(
            study_name=file.name,
            storage=storage,
            directions=[*file.objectives.values()],
            pruner=pruners[file.pruner],
            load_if_exists=True,
        )
        _check_same(study, json.loads(json.dumps(record)), folder)
        if base.data.val_size == 0:
            say(f"validation on {VAL_SIZE:.0%} of the training images, as {file.recipe} has data.val_size 0")
        control = Control(file.seconds, study.user_attrs.get("seconds", 0))
        _catch_signals(control)

        def settings(trial: Trial) -> list[str]:
            trial.study.sampler = _sampler(file, grid, trial.number)
            return as_flags(file.suggest(trial))

        count = min(file.trials, len(grid) or math.inf)
        job = Job(study, storage, folder / "trial", count, words, new, settings, [*file.objectives],
                  lambda trial: _report(job, control, trial))  # fmt: skip
        run_job(job, workers, control)
        trials, best = job.trials(), ranked(study, job.trials())
        if not best and not control.signals:
            raise Failure(f"no trial of {display_path(folder)} is complete: raise trials or time, or see trial-*/")
        if not control.signals:
            recipe: Any = {}
            for path in files:
                recipe = _merged(recipe, plain_values(path) or {})
            recipe = nested({**file.settings, **file.suggest(FixedTrial(best[0].params))}, recipe)
            rows = rows_of(trials, job.objectives)
            best_rows = [
                {name: value for name, value in row.items() if name not in ("state", "error")}
                for row in rows_of(best[:BEST], job.objectives)
            ]
            sentences = [
                f"Best of {len(trials)} trials: {best[0].number}, {job.objectives[0]} {text(best[0].values[0])}"
            ]
            table = Table(*best_rows[0])
            for row in best_rows:
                table.add_row(*map(text, row.values()))
            for_tables().print(table)
            write_results(folder, study, rows, best_rows, recipe, sentences)
        if options.confirm and not control.signals:
            run = replace(control, seconds=math.inf, outcomes=[])
            sentences.append(_confirm(options.confirm, file, best[0], base.seed_everything or 0, job, workers, run))
            write_results(folder, study, rows, best_rows, recipe, sentences)
    if control.signals:
        interruption = Interrupted(control.signals[0])
        hidden = url.render_as_string()  # without the password
        shown = [word.replace(options.storage or hidden, hidden) for word in argv]
        interruption.resume = f"{program(sys.argv[0], 'sweep')} {shlex.join(shown)}"
        raise interruption
    say(*sentences, f"results {display_path(folder)}/sweep.html")
    say(f"next: cifar-lit train --recipe {shlex.join([display_path(folder / 'best.yaml'), *typed])}")


def _check_same(study: optuna.Study, record: Mapping[str, Any], folder: Path) -> None:
    """Record the settings of a new sweep. Raise UsageError if an existing one of this name has others."""
    earlier = study.user_attrs.get("sweep")
    if earlier is None and study.trials:
        raise UsageError(f"the database has another study called {study.study_name}: give this sweep a name (name: …)")
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


def _report(job: Job, control: Control, trial: FrozenTrial) -> None:
    """Print the line of a finished trial."""
    trials = job.trials()
    finished = sum(each.state.is_finished() for each in trials)
    results = [f"{name} {text(value)}" for name, value in zip(job.objectives, trial.values or (), strict=False)]
    if trial.state != TrialState.COMPLETE:
        results.insert(0, f"failed: {trial.user_attrs['error']}" if trial.user_attrs["error"] else "pruned")
    if best := ranked(job.study, trials):
        results.append(f"best {text(best[0].values[0])} (trial {best[0].number})")
    pace = (control.used - control.spent) / (1 + len(control.outcomes))
    left = min(pace * (job.count - finished), control.seconds - control.used)
    if 0 < left < math.inf:
        results.append(f"about {duration_text(left)} left")
    of = "" if job.count == math.inf else f" of {job.count}"
    parameters = [f"{name} {text(value)}" for name, value in trial.params.items()]
    say(f"trial {trial.number} ({finished}{of}): {' · '.join(parameters)} → {' · '.join(results)}")


def _confirm(
    seeds: int,
    file: SweepFile,
    best: FrozenTrial,
    seed: int,
    job: Job,
    workers: Sequence[Sequence[str]],
    control: Control,
) -> str:
    """Train the starting recipe and the best trial with new seeds; return a sentence about the difference.

    This is a study of its own, whose trials have even numbers for the recipe and odd ones for the best trial.
    """
    first = 1 + max(int(seed), int(best.params.get("seed_everything", 0)))
    name, objective = f"{file.name} confirm {best.number}", job.objectives[0]
    study = optuna.create_study(
        study_name=name, storage=job.storage, direction=file.objectives[objective], load_if_exists=True
    )

    def settings(trial: Trial) -> list[str]:
        chosen = file.suggest(FixedTrial(best.params)) if trial.number % 2 else {}
        return as_flags({**chosen, "seed_everything": first + trial.number // 2})

    def report(trial: FrozenTrial) -> None:
        side = f"trial {best.number}" if trial.number % 2 else file.recipe
        result = trial.user_attrs["error"] or f"{objective} {text(trial.values[0])}"
        say(f"confirmation, seed {first + trial.number // 2}, {side}: {result}")

    again = replace(
        job, study=study, folder=job.folder.with_name(f"confirm-{best.number:03}"), count=2 * seeds,
        settings=settings, objectives=[objective], report=report,
    )  # fmt: skip
    if len(study.trials) < 2 * seeds:
        say(f"confirming trial {best.number} with {seeds} new seeds: {2 * seeds} trainings (--confirm {seeds})")
    run_job(again, workers, control)
    values = {trial.number: trial.values[0] for trial in again.trials() if trial.state == TrialState.COMPLETE}
    pairs = [
        (values[number], values[number + 1]) for number in range(0, 2 * seeds, 2) if {number, number + 1} <= {*values}
    ]
    return conclusion(objective, file.objectives[objective] == "maximize", pairs, 2 * seeds - len(values))


def _merged(base: Any, more: Any) -> Any:
    """Return nested settings with those of a further file."""
    if not isinstance(base, dict) or not isinstance(more, dict):
        return more
    return {**base, **{name: _merged(base.get(name), value) for name, value in more.items()}}
