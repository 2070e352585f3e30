"""Run the trials of an Optuna study: each is a training in a process, resumed if its worker is lost."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from cifar_lit.bench.process import as_error, ask_to_stop, child_environment, kill_group, started
from cifar_lit.errors import Failure
from cifar_lit.files import DISK_FULL, lock_file, open_inside
from cifar_lit.runs.run_folder import CHECKPOINTS, display_path, is_finished, read_curves, read_metrics
from cifar_lit.sweep.check import SETTINGS, write_settings
from cifar_lit.sweep.database import GRACE, HEARTBEAT
from cifar_lit.text import natural_key
from cifar_lit.threads import VARIABLE, free_cores
from cifar_lit.training.orderly_stop import Interrupted

POLL = 0.5  # seconds
MAX_KILLS = 3  # times that a trial's process may be killed
FULL = "|".join(map(os.strerror, DISK_FULL))
SAME = 3  # failures in a row, at the start, that end the sweep
HOST = socket.gethostname()
LOCK_FILE = ".worker"


@dataclass
class Control:
    """State of one command: signals received, outcomes of its trials, and its end by the time budget.

    Args:
        seconds: the time budget.
        start: begin of the time budget, in seconds of `time.monotonic`. Earlier commands have used a part of it.
    """

    seconds: float
    start: float
    signals: list[int] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)  # error of each finished trial, without digits
    lock: Any = field(default_factory=threading.Lock)  # protects the outcomes and the console
    failed: bool = False

    @property
    def used(self) -> float:
        """Return the used seconds of the time budget."""
        return time.monotonic() - self.start

    @property
    def stopping(self) -> bool:
        """Return whether the trials have to stop."""
        return bool(self.signals) or self.failed or self.used >= self.seconds


@dataclass
class Job:
    """The trials of one study.

    Args:
        study: the study. Each worker loads it again, because a study has one sampler.
        storage: database of the study.
        folder: the folders of the trials are this path, a dash and the number.
        count: number of trials, which may be infinite.
        settings: returns the settings of a trial from the sweep file, by dotted name.
        flags: returns the flags of `fit` for a trial, without its folder and devices.
        objectives: names of the metrics.
        report: called with each finished trial.
        workers: further arguments of `fit` for each worker.
        control: state of the command.
    """

    study: optuna.Study
    storage: RDBStorage
    folder: Path
    count: float
    settings: Callable[[Trial], Mapping[str, Any]]
    flags: Callable[[Trial], Sequence[str]]
    objectives: Sequence[str]
    report: Callable[[FrozenTrial], None]
    workers: Sequence[Sequence[str]]
    control: Control

    def trials(self) -> list[FrozenTrial]:
        """Return the trials, without any that two workers began beyond the number of trials."""
        return [trial for trial in self.study.get_trials(deepcopy=False) if trial.number < self.count]

    def folder_of(self, number: int) -> Path:
        """Return the folder of a trial."""
        return self.folder.with_name(f"{self.folder.name}-{number:03}")


def run_job(job: Job) -> None:
    """Run all trials of a job, some of them perhaps by other commands. Raise Interrupted after a stop signal."""
    control, count = job.control, len(job.workers)
    environment = child_environment()
    if count > 1:
        environment.setdefault(VARIABLE, str(max(1, free_cores() // count)))
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(Worker(job, words, environment).work) for words in job.workers]
        try:
            running = True
            while running and not any(future.done() and future.exception() for future in futures):
                running = bool(wait(futures, HEARTBEAT, FIRST_EXCEPTION).not_done)
                job.study.set_user_attr("seconds", max(control.used, job.study.user_attrs.get("seconds", 0)))
        finally:
            control.failed = any(not future.done() for future in futures)
    for future in futures:
        future.result()
    if control.signals:
        raise Interrupted(control.signals[0])


class Worker:
    """Runs one trial after the other, on the devices given by `words`."""

    def __init__(self, job: Job, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self.job, self.words, self.environment, self.control = job, words, environment, job.control
        self.study = optuna.load_study(study_name=job.study.study_name, storage=job.storage, pruner=job.study.pruner)
        self.first_seen: dict[Any, float] = {}  # when this worker saw a running trial without a worker

    def work(self) -> None:
        """Run trials until all are finished or the command stops."""
        while not self.control.stopping:
            self._take_over()
            trials = self.job.trials()
            states = {trial.state for trial in trials}
            if len(trials) >= self.job.count and TrialState.WAITING not in states:
                if TrialState.RUNNING not in states:
                    return
                time.sleep(POLL)
                continue
            trial = self.study.ask()
            if trial.number < self.job.count:
                self._attempt(trial)
            else:  # another worker asked at the same time; the trial is for a sweep that is extended
                self._give_back(trial._trial_id)

    # ---- Trials of lost workers. A trial is RUNNING while a worker has it, and otherwise WAITING until it is finished.

    def _take_over(self) -> None:
        """Give back the trials of lost workers: they sent no heartbeat, or ended on this machine."""
        stale = self.job.storage._get_stale_trial_ids(self.study._study_id)
        for trial in self.job.trials():
            if trial.state != TrialState.RUNNING:
                continue
            host = trial.user_attrs.get("worker", "").partition(" ")[0]
            is_lost = trial._trial_id in stale or (host == HOST and self._is_free(trial.number))
            if not host:  # killed before its first heartbeat; clocks of other machines may differ
                now = time.monotonic()
                is_lost |= now - self.first_seen.setdefault((trial.number, trial.datetime_start), now) > GRACE
            if is_lost:
                self._give_back(trial._trial_id)

    def _is_free(self, number: int) -> bool:
        """Return whether the worker of a trial and its training have ended, by the lock of a file in its folder."""
        with suppress(OSError), open_inside(self.job.folder_of(number) / LOCK_FILE, "r+b") as file:
            lock_file(file)
            return True
        return False

    def _give_back(self, trial_id: int) -> None:
        """Let another worker continue a trial. Without a worker and with a heartbeat, it is not given back again."""
        with suppress(UpdateFinishedTrialError):
            self.job.storage.set_trial_user_attr(trial_id, "worker", "")
            self.job.storage.record_heartbeat(trial_id)
            self.job.storage.set_trial_state_values(trial_id, TrialState.WAITING)

    def _has(self, trial: Trial, name: str) -> bool:
        """Return whether this worker still has a trial, and send a heartbeat."""
        frozen = self.job.storage.get_trial(trial._trial_id)
        if frozen.state != TrialState.RUNNING or frozen.user_attrs.get("worker") != name:
            return False
        self.job.storage.record_heartbeat(trial._trial_id)
        return True

    # ---- One trial.

    def _attempt(self, trial: Trial) -> None:
        """Begin or continue a trial, and record its result unless it was interrupted."""
        self.job.storage.record_heartbeat(trial._trial_id)
        folder = self.job.folder_of(trial.number)
        folder.mkdir(parents=True, exist_ok=True)
        with open_inside(folder / LOCK_FILE, "ab") as file:  # the training inherits the open file, and thus the lock
            try:
                lock_file(file)
            except (BlockingIOError, PermissionError):  # the training of a lost worker is writing its checkpoint
                self._give_back(trial._trial_id)
                time.sleep(POLL)
                return
            except OSError:  # a file system without locks: heartbeats have to do
                pass
            name = f"{HOST} {secrets.token_hex(8)}"
            trial.set_user_attr("worker", name)
            config = write_settings(folder / SETTINGS, self.job.settings(trial))
            words = [*self.job.flags(trial), "--config", config, *self.words, f"--logs={folder}"]
            run = run_in(folder)
            state: int | str = 0  # unchanged if a worker was lost after the training, before it recorded the result
            if run is None or not is_finished(run, needs_test=False):
                is_resumable = run and any((run / checkpoint).is_file() for checkpoint in CHECKPOINTS)
                words += [f"--resume={run}"] if is_resumable else []
                state = self._train(words, trial, name, file.fileno())
            if self._has(trial, name):
                self._record(trial, state, folder)

    def _train(self, words: Sequence[str], trial: Trial, name: str, lock: int) -> int | str:
        """Train in a process. Return its exit code, or "pruned" or "stopped" if this worker ended it.

        The learning curve is read from its run folder while it trains. lock: an open file that the process inherits.
        """
        folder = self.job.folder_of(trial.number)
        command = [sys.executable, "-m", "cifar_lit.sweep", "fit", *words]
        settings: dict[str, Any] = {"stdin": subprocess.PIPE, "env": self.environment}
        if os.name == "posix":  # Windows releases the lock with the worker, which ends its training
            settings["pass_fds"] = [lock]
        reported = set(self.job.storage.get_trial(trial._trial_id).intermediate_values)
        ending, next_beat = "", 0.0
        with (
            open_inside(folder / "output.txt", "a", encoding="utf-8") as out,
            open_inside(folder / "errors.txt", "w", encoding="utf-8") as errors,
            started(command, stdout=out, stderr=errors, **settings) as process,
        ):
            while True:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLL)
                    break
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + HEARTBEAT
                    is_lost = not self._has(trial, name)
                if not ending:
                    if is_lost or self.control.stopping:
                        ending = "stopped"
                    elif len(self.job.objectives) == 1 and self._is_hopeless(trial, reported, folder):
                        ending = "pruned"
                    if ending:
                        ask_to_stop(process)
                if len(self.control.signals) > 1:
                    kill_group(process)
        return ending if ending and process.returncode else process.returncode

    def _is_hopeless(self, trial: Trial, reported: set[int], folder: Path) -> bool:
        """Report new points of the learning curve, and return whether the pruner ends the trial."""
        (objective,) = self.job.objectives
        run = run_in(folder)
        for row in read_curves(run) if run else ():
            epoch = int(row.get("epoch", 0)) + 1
            if objective in row and epoch not in reported:
                reported.add(epoch)
                with suppress(UpdateFinishedTrialError):  # another worker has taken it over and finished it
                    trial.report(row[objective], epoch)
                if trial.should_prune():
                    return True
        return False

    def _record(self, trial: Trial, state: int | str, folder: Path) -> None:
        """Record the result of a trial, or give it back if it was stopped or killed."""
        run = run_in(folder)
        code = state if isinstance(state, int) else 0
        is_killed = code < 0 or code >= 128
        kills = trial.user_attrs.get("kills", 0) + is_killed
        trial.set_user_attr("kills", kills)
        error = ""
        values = [value_of(run, name) if run else None for name in self.job.objectives] if state == 0 else []
        if is_killed:
            error = f"its process was killed {kills} times (exit code {code})"
        elif code:
            error = str(as_error(code, (folder / "errors.txt").read_text("utf-8", errors="replace"), "the training"))
        elif None in values:
            error = f"the run has no {self.job.objectives[values.index(None)]}"
        if error and (shutil.disk_usage(folder).free < 1 << 20 or re.search("disk is full|" + FULL, error)):
            self._give_back(trial._trial_id)
            raise Failure(f"the disk of {display_path(folder)} is full: free some space, then repeat the command")
        if state == "stopped" or (is_killed and kills < MAX_KILLS):
            self._give_back(trial._trial_id)
            return
        if run:
            trial.set_user_attr("run", display_path(run))
        trial.set_user_attr("error", error)
        outcome = TrialState.PRUNED if state == "pruned" else TrialState.FAIL if error else TrialState.COMPLETE
        self.study.tell(trial, [value for value in values if value is not None and not error] or None, outcome)
        with self.control.lock:
            self.job.report(self.job.storage.get_trial(trial._trial_id))
            self.control.outcomes.append(re.sub(r"\d+", "", error))
            if len(self.control.outcomes) == SAME and error and len({*self.control.outcomes}) == 1:
                raise Failure(f"the first {SAME} trials failed: {error}")


def run_in(folder: Path) -> Path | None:
    """Return the newest run in a trial's folder."""
    runs = (config.parent for config in folder.glob("*/config.yaml"))
    return max(runs, key=lambda run: natural_key(run.name), default=None)


def value_of(run: Path, name: str) -> float | None:
    """Return a metric of a finished run from metrics.json, else the last one in metrics.csv; None if it is missing."""
    value: Any = read_metrics(run)
    for part in name.split("/"):
        value = value.get(part) if isinstance(value, dict) else None
    curve = [row[name] for row in read_curves(run) if name in row]
    return float(value) if isinstance(value, int | float) else next(reversed(curve), None)
