"""The trials of a sweep: an Optuna study whose objective is a training in a process of its own.

Optuna records an interrupted trial as failed and enqueues its settings again. The new attempt resumes the training in
the folder of the first one.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import optuna
import yaml
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, IntegrityError

from cifar_lit.bench.process import as_error, ask_to_stop, kill_group, started
from cifar_lit.cli.several import find_run
from cifar_lit.errors import Failure
from cifar_lit.extras.sweep.file import SweepFile, nested
from cifar_lit.files import check_database, without_links, write_text
from cifar_lit.runs.run_folder import display_path, is_finished, read_curves, read_metrics
from cifar_lit.text import printable, say

POLL = 0.5  # seconds
SAME = 3  # failures in a row, at the start, that end the sweep
MAX_COLLISIONS = 10  # attempts to open a new database together with other workers
MAX_RETRIES = 20  # for an interrupted trial
MAX_KILLED = 3  # for a trial whose training is killed, for example because memory ran out


class NotTrained(Exception):
    """A training has no results. Without a message, it was interrupted."""


def open_study(url: URL, file: SweepFile, grace: int, grid: Sequence[Mapping[str, object]]) -> optuna.Study:
    """Create or load a study. Raise an error of any type if its rows are not those of a sweep.

    grace: seconds without a heartbeat after which a trial is enqueued again. grid: trials to enqueue.
    """
    is_file = url.get_backend_name() == "sqlite"
    if is_file:
        check_database(Path(str(url.database)).resolve())
    for attempt in range(1, MAX_COLLISIONS + 1):
        try:
            storage = RDBStorage(
                url.render_as_string(hide_password=False),
                {"connect_args": {"timeout" if is_file else "connect_timeout": 30}, "pool_pre_ping": True},
                heartbeat_interval=max(1, grace // 6),
                grace_period=grace,
                heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(max_retry=MAX_RETRIES),
            )
            break
        except DBAPIError as error:
            # Workers that start together all try to create the tables, and all but one fail.
            collided = isinstance(error, IntegrityError) or "already exists" in str(error)
            if not collided or attempt == MAX_COLLISIONS:
                raise
            time.sleep(POLL)
    directions = [*file.objectives.values()]
    is_new = True
    try:
        study = optuna.create_study(storage=storage, study_name=file.name, directions=directions)
    except optuna.exceptions.DuplicatedStudyError:
        is_new = False
        study = optuna.load_study(storage=storage, study_name=file.name)
    trials = study.get_trials()
    seed = None  # two commands that begin at the same moment: one has no seed
    if is_new or trials:  # a continued sweep draws other values
        seed = (1_000_003 * file.seed + len(trials)) % (1 << 32)
    study.sampler = optuna.samplers.RandomSampler(seed)
    if file.sampler == "tpe":
        study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    study.pruner = optuna.pruners.NopPruner()
    if file.pruner == "median":
        study.pruner = optuna.pruners.MedianPruner()
    if [direction.name.lower() for direction in study.directions] != directions:
        raise ValueError("its objectives have other directions")
    for trial in trials:
        if trial.state == TrialState.COMPLETE:
            file.suggest(trial)
            if len(trial.values) != len(directions) or not all(map(math.isfinite, trial.values)):
                raise ValueError(f"trial {trial.number} is complete without finite values")
        if trial.state == TrialState.RUNNING:  # its worker may have been killed before the first heartbeat
            study_id = storage.get_study_id_from_name(file.name)
            storage.record_heartbeat(storage.get_trial_id_from_study_id_trial_number(study_id, trial.number))
    for parameters in grid:
        study.enqueue_trial(dict(parameters), skip_if_exists=True)
    return study


class Trials:
    """The trials of a study. A trial has the number of its first attempt.

    count: may be infinite. words: flags of `fit` for all trials. workers: further flags for each worker.
    """

    def __init__(
        self,
        file: SweepFile,
        study: optuna.Study,
        folder: Path,
        count: float,
        words: Sequence[str],
        workers: Sequence[Sequence[str]],
    ) -> None:
        self.file, self.study, self.folder, self.count, self.words = file, study, folder, count, words
        self.jobs, self.free = len(workers), SimpleQueue[Sequence[str]]()
        for flags in workers:
            self.free.put(flags)
        self.signals: list[int] = []  # received by this command
        self.fault: Exception | None = None  # ends this command
        self.errors: list[str] = []  # from the trials that this command has finished
        self.start = time.monotonic() - study.user_attrs.get("seconds", 0)

    @property
    def stopping(self) -> bool:
        """Whether the trainings have to stop."""
        return bool(self.signals or self.fault) or time.monotonic() - self.start >= self.file.seconds

    def latest(self) -> list[FrozenTrial]:
        """Return the last attempt of each trial."""
        return [*{first_number(trial): trial for trial in self.study.get_trials(deepcopy=False)}.values()]

    def missing(self) -> float:
        """Return the number of trials that nobody has begun."""
        states = [trial.state for trial in self.latest()]
        waiting = states.count(TrialState.WAITING)
        if self.file.sampler == "grid":
            return waiting
        return self.count - (len(states) - waiting)

    def run(self, grace: int) -> None:
        """Run the trials, some of them perhaps by other commands. grace: seconds without a heartbeat of a lost one."""
        is_waiting = False
        while not self.stopping:
            missing = self.missing()
            if missing > 0:
                limit = None if missing == math.inf else int(missing)
                self.study.optimize(self._run, limit, n_jobs=self.jobs, catch=(Exception,), callbacks=[self._after])
            elif any(trial.state == TrialState.RUNNING for trial in self.latest()):
                if not is_waiting:
                    say(f"waiting for trials of other workers; one without a heartbeat for {grace} s is resumed")
                is_waiting = True
                time.sleep(POLL)
                optuna.storages.fail_stale_trials(self.study)
            else:
                break
        self._record_seconds()  # A time limit may have passed after the last trial recorded its end.
        if self.fault:
            raise self.fault

    def _record_seconds(self) -> None:
        seconds = max(time.monotonic() - self.start, self.study.user_attrs.get("seconds", 0))
        self.study.set_user_attr("seconds", seconds)

    def _run(self, trial: Trial) -> list[float]:
        flags = self.free.get()
        try:
            return self._values(trial, flags)
        except NotTrained as error:
            trial.set_user_attr("error", str(error))
            raise
        except optuna.TrialPruned:
            raise
        except Exception as error:
            self.fault = error
            raise
        finally:
            self.free.put(flags)

    def _after(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Enqueue an interrupted trial again, or print the line of a finished one."""
        self._record_seconds()
        error = trial.user_attrs.get("error", "")
        if trial.state == TrialState.FAIL and not error:
            RetryHeartbeatStaleTrialCallback(max_retry=MAX_RETRIES)(study, trial)
        else:
            self._print(trial, error)
            self.errors.append(re.sub(r"\d+", "", error))
        if error and len(self.errors) == SAME and len({*self.errors}) == 1:
            self.fault = Failure(f"the first {SAME} trials failed: {error}")
        if self.stopping or self.missing() <= 0:
            study.stop()

    def _print(self, trial: FrozenTrial, error: str) -> None:
        finished = sum(each.state.is_finished() for each in self.latest())
        progress = str(finished)
        if self.count < math.inf:
            progress = f"{finished} of {self.count}"
        parameters = [f"{name} {text(value)}" for name, value in trial.params.items()]
        results = [
            f"{name} {text(value)}" for name, value in zip(self.file.objectives, trial.values or (), strict=False)
        ]
        if error:
            results = [f"failed: {error}"]
        elif trial.state == TrialState.PRUNED:
            results.insert(0, "pruned")
        say(f"trial {first_number(trial)} ({progress}): {' · '.join(parameters)} → {' '.join(results)}")

    def _values(self, trial: Trial, flags: Sequence[str]) -> list[float]:
        """Begin or resume the training of a trial; return its values."""
        frozen = self.study.get_trials(deepcopy=False)[trial.number]
        folder = self.folder / f"trial-{first_number(frozen):03}"
        folder.mkdir(parents=True, exist_ok=True)
        settings = nested({**self.file.settings, **self.file.suggest(trial)}, {})
        write_text(folder / "settings.yaml", yaml.safe_dump(settings))  # a file is not trusted, and flags are
        run = find_run(folder, {})
        if run is None or not is_finished(run, needs_test=False):
            words = [*self.words, f"--config={folder / 'settings.yaml'}", *flags, f"--logs={folder}"]
            if run:
                words.append(f"--resume={run}")
            self._train(trial, words, folder)
            run = find_run(folder, {})
        if run is None:
            raise NotTrained("the training has no run folder")
        trial.set_user_attr("run", display_path(run))
        values = []
        for name in self.file.objectives:
            value = value_of(run, name)
            if value is None:
                raise NotTrained(f"the run has no {name}")
            values.append(value)
        return values

    def _train(self, trial: Trial, words: Sequence[str], folder: Path) -> None:
        """Train in a process; raise TrialPruned or NotTrained if it does not finish."""
        command = [sys.executable, "-m", "cifar_lit.extras.sweep", "fit", *words]
        ending: Exception | None = None
        with (
            open(folder / "output.txt", "ab", opener=without_links) as out,
            open(folder / "errors.txt", "wb", opener=without_links) as errors,
            started(command, stdin=subprocess.PIPE, stdout=out, stderr=errors) as process,
        ):
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLL)
                if len(self.signals) > 1:
                    kill_group(process)
                elif ending is None:
                    ending = self._reason_to_stop(trial, folder)
                    if ending:
                        ask_to_stop(process)
        code = process.returncode
        if code == 0:
            return
        if ending:
            raise ending
        error = as_error(code, (folder / "errors.txt").read_text("utf-8", errors="replace"))
        if "disk is full" in str(error):
            raise error
        if " is writing " in str(error):  # by the training of a killed command
            raise NotTrained
        was_killed = not 0 < code < 128
        history = RetryHeartbeatStaleTrialCallback.retry_history(self.study.get_trials(deepcopy=False)[trial.number])
        if was_killed and len(history) < MAX_KILLED:
            raise NotTrained
        raise NotTrained(error)

    def _reason_to_stop(self, trial: Trial, folder: Path) -> Exception | None:
        """Report new points of the learning curve. Return the exception of a trial that has to stop."""
        frozen = self.study.get_trials(deepcopy=False)[trial.number]
        if self.stopping or frozen.state != TrialState.RUNNING:
            return NotTrained()
        run, objective = find_run(folder, {}), next(iter(self.file.objectives))
        if run is None or self.file.pruner == "none":
            return None
        for row in read_curves(run):
            epoch = int(row.get("epoch", 0)) + 1
            if objective in row and epoch not in frozen.intermediate_values:
                trial.report(row[objective], epoch)
                if trial.should_prune():
                    return optuna.TrialPruned()
        return None


def first_number(trial: FrozenTrial) -> int:
    """Return the number of a trial's first attempt; raise ValueError if the database has an invalid one."""
    number = RetryHeartbeatStaleTrialCallback.retried_trial_number(trial)
    if number is not None and number not in range(trial.number):
        raise ValueError(f"trial {trial.number} repeats no earlier one")
    if number is None:
        return trial.number
    return int(number)


def value_of(run: Path, name: str) -> float | None:
    """Return a metric of a finished run from metrics.json, else the last one in metrics.csv; None if it is missing."""
    value: object = read_metrics(run)
    for part in name.split("/"):
        value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, int | float):
        return float(value)
    curve = [row[name] for row in read_curves(run) if name in row]
    if not curve:
        return None
    return curve[-1]


def text(value: object) -> str:
    """Return a short text of a parameter or a metric."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return printable(str(value))
