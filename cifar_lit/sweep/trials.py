"""The trials of a sweep: an Optuna study whose objective is a training in a process of its own.

Optuna records an interrupted trial as failed, and enqueues its settings again. The new attempt resumes the training in
the folder of the first one.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import optuna
import yaml
from optuna.storages import RetryHeartbeatStaleTrialCallback
from optuna.trial import FrozenTrial, Trial, TrialState

from cifar_lit.bench.process import as_error, ask_to_stop, kill_group, started
from cifar_lit.errors import Failure
from cifar_lit.files import open_inside, write_text
from cifar_lit.runs.run_folder import CHECKPOINTS, display_path, is_finished, read_curves, read_metrics
from cifar_lit.sweep.check import nested
from cifar_lit.sweep.space import SweepFile
from cifar_lit.text import natural_key, printable, say

POLL = 0.5  # seconds
SAME = 3  # failures in a row, at the start, that end the sweep
MAX_RETRIES = 20  # attempts of an interrupted trial


class NotTrained(Exception):
    """The training has no results. Without the attribute `error`, its trial is enqueued again."""


class Trials:
    """The trials of a sweep. Their numbers are those of their first attempts.

    Args:
        count: number of trials, which may be infinite.
        flags: flags of `fit` for all trials.
        workers: further flags for each worker.
    """

    def __init__(
        self, file: SweepFile, study: optuna.Study, folder: Path, count: float, flags: Sequence[str],
        workers: Sequence[Sequence[str]],
    ) -> None:  # fmt: skip
        self.file, self.study, self.folder, self.count = file, study, folder, count
        self.flags, self.workers = flags, len(workers)
        self.free: SimpleQueue[Sequence[str]] = SimpleQueue()
        for words in workers:
            self.free.put(words)
        self.signals: list[int] = []  # received by this command
        self.fault: Exception | None = None  # ends this command
        self.errors: list[str] = []  # of the trials that this command has finished
        self.start = time.monotonic() - study.user_attrs.get("seconds", 0)

    @property
    def stopping(self) -> bool:
        """Return whether the trainings have to stop."""
        return bool(self.signals or self.fault) or time.monotonic() - self.start >= self.file.seconds

    def latest(self) -> dict[int, FrozenTrial]:
        """Return the last attempt of each trial, by number."""
        return {first_number(trial): trial for trial in self.study.get_trials(deepcopy=False)}

    def missing(self) -> float:
        """Return the number of trials that no worker has begun."""
        return self.count - sum(trial.state != TrialState.WAITING for trial in self.latest().values())

    def rows(self) -> dict[int, dict[str, Any]]:
        """Return the columns of trials.csv for each trial, by number."""
        rows = {}
        for number, trial in self.latest().items():
            row = {"trial": number, "state": trial.state.name.lower()}
            for index, name in enumerate(self.file.objectives):
                row[name] = trial.values[index] if trial.values else None
            seconds = trial.duration and round(trial.duration.total_seconds(), 1)
            attributes = {name: trial.user_attrs.get(name) for name in ("run", "error")}
            rows[number] = {**row, **trial.params, "seconds": seconds, **attributes}
        return rows

    def ranked(self) -> list[int]:
        """Return the numbers of the complete trials, best first. With two objectives, only the Pareto front."""
        complete = {number: trial for number, trial in self.latest().items() if trial.state == TrialState.COMPLETE}
        if len(self.study.directions) > 1:
            front = [trial.number for trial in self.study.best_trials]
            complete = {number: trial for number, trial in complete.items() if trial.number in front}
        is_max = self.study.directions[0] == optuna.study.StudyDirection.MAXIMIZE
        return sorted(complete, key=lambda number: complete[number].values[0], reverse=is_max)

    def _report(self, number: int, trial: FrozenTrial) -> None:
        """Print the line of a finished trial."""
        rows = self.rows()
        finished = sum(row["state"] not in ("running", "waiting") for row in rows.values())
        of = "" if self.count == float("inf") else f" of {self.count}"
        row = rows[number]
        results = [f"{name} {text(row[name])}" for name in self.file.objectives if row[name] is not None]
        if trial.state != TrialState.COMPLETE:
            results.insert(0, f"failed: {row['error']}" if row["error"] else "pruned")
        for best in self.ranked()[:1]:
            results.append(f"best {text(rows[best][next(iter(self.file.objectives))])} (trial {best})")
        parameters = [f"{name} {text(value)}" for name, value in trial.params.items()]
        say(f"trial {number} ({finished}{of}): {' · '.join(parameters)} → {' · '.join(results)}")

    def run(self, grace: int) -> None:
        """Run the trials, some of them perhaps by other commands. grace: seconds without a heartbeat of a lost one."""
        note = f"waiting for trials of other workers; one without a heartbeat for {grace} s is resumed"
        while not self.stopping:
            missing = self.missing()
            if missing > 0:
                limit = None if missing == float("inf") else int(missing)
                arguments = {"catch": (Exception,), "callbacks": [self._after]}
                self.study.optimize(self._objective, limit, n_jobs=self.workers, **arguments)
                continue
            if not any(trial.state == TrialState.RUNNING for trial in self.latest().values()):
                break
            if note:
                say(note)
            note = ""
            time.sleep(POLL)
            optuna.storages.fail_stale_trials(self.study)
        if self.fault:
            raise self.fault

    def _objective(self, trial: Trial) -> list[float]:
        """Run an attempt of a trial on the devices of a free worker."""
        words = self.free.get()
        try:
            return self._attempt(trial, words)
        except (NotTrained, optuna.TrialPruned):
            raise
        except Exception as error:
            self.fault = error
            raise
        finally:
            self.free.put(words)

    def _after(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Enqueue an interrupted trial again, or report a finished one."""
        study.set_user_attr("seconds", max(time.monotonic() - self.start, study.user_attrs.get("seconds", 0)))
        error = trial.user_attrs.get("error", "")
        if trial.state == TrialState.FAIL and not error:
            RetryHeartbeatStaleTrialCallback(max_retry=MAX_RETRIES)(study, trial)
        else:
            self._report(first_number(trial), trial)
            self.errors.append(error)
        if error and len(self.errors) == SAME and len({*self.errors}) == 1:
            self.fault = Failure(f"the first {SAME} trials failed: {error}")
        if self.stopping or self.missing() <= 0:
            study.stop()

    def _attempt(self, trial: Trial, words: Sequence[str]) -> list[float]:
        """Begin or resume the training of a trial; return its values."""
        number = first_number(self.study.get_trials(deepcopy=False)[trial.number])
        folder = self.folder / f"trial-{number:03}"
        folder.mkdir(parents=True, exist_ok=True)
        settings = nested({**self.file.settings, **self.file.suggest(trial)}, {})
        write_text(folder / "settings.yaml", yaml.safe_dump(settings))  # a file is not trusted, and flags are
        run = run_in(folder)
        if run is None or not is_finished(run, needs_test=False):
            words = [*self.flags, f"--config={folder / 'settings.yaml'}", *words, f"--logs={folder}"]
            if run and any((run / checkpoint).is_file() for checkpoint in CHECKPOINTS):
                words.append(f"--resume={run}")
            self._train(trial, words, folder)
            run = run_in(folder)
        trial.set_user_attr("run", display_path(run) if run else "")
        values = []
        for name in self.file.objectives:
            value = value_of(run, name) if run else None
            if value is None:
                trial.set_user_attr("error", f"the run has no {name}")
                raise NotTrained
            values.append(value)
        return values

    def _train(self, trial: Trial, words: Sequence[str], folder: Path) -> None:
        """Train in a process; raise TrialPruned or NotTrained if it does not finish."""
        command = [sys.executable, "-m", "cifar_lit.sweep", "fit", *words]
        reported: set[int] = set()
        ending: Exception | None = None
        with (
            open_inside(folder / "output.txt", "a", encoding="utf-8") as out,
            open_inside(folder / "errors.txt", "w", encoding="utf-8") as errors,
            started(command, stdin=subprocess.PIPE, stdout=out, stderr=errors) as process,
        ):
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLL)
                if len(self.signals) > 1:
                    kill_group(process)
                elif ending is None and (ending := self._reason_to_stop(trial, reported, folder)):
                    ask_to_stop(process)
        code = process.returncode
        if code == 0:
            return
        if ending:
            raise ending
        error = str(as_error(code, (folder / "errors.txt").read_text("utf-8", errors="replace"), "the training"))
        if "disk is full" in error:
            raise Failure(f"{display_path(folder)}: {error}")
        # A killed process is resumed, and also one whose run is still held by the training of a killed command.
        if 0 < code < 128 and " is writing " not in error:
            trial.set_user_attr("error", error)
        raise NotTrained

    def _reason_to_stop(self, trial: Trial, reported: set[int], folder: Path) -> Exception | None:
        """Report new points of the learning curve. Return the exception of a trial that has to stop."""
        if self.stopping or self.study.get_trials(deepcopy=False)[trial.number].state != TrialState.RUNNING:
            return NotTrained()
        run, objectives = run_in(folder), list(self.file.objectives)
        if run is None or len(objectives) > 1:
            return None
        for row in read_curves(run):
            epoch = int(row.get("epoch", 0)) + 1
            if objectives[0] in row and epoch not in reported:
                reported.add(epoch)
                trial.report(row[objectives[0]], epoch)
                if trial.should_prune():
                    return optuna.TrialPruned()
        return None


def text(value: Any) -> str:
    """Return a short text of a parameter or a metric."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))


def first_number(trial: FrozenTrial) -> int:
    """Return the number of a trial's first attempt; raise ValueError if the database has an invalid one."""
    number = RetryHeartbeatStaleTrialCallback.retried_trial_number(trial)
    if number is None:
        return trial.number
    if number not in range(trial.number):
        raise ValueError(f"trial {trial.number} repeats no earlier one")
    return int(number)


def run_in(folder: Path) -> Path | None:
    """Return the newest run in a trial's folder."""
    runs = (config.parent for config in folder.glob("*/config.yaml"))
    return max(runs, key=lambda run: natural_key(run.name), default=None)


def value_of(run: Path, name: str) -> float | None:
    """Return a metric of a finished run from metrics.json, else the last one in metrics.csv; None if it is missing."""
    value = read_metrics(run)
    for part in name.split("/"):
        value = value.get(part) if isinstance(value, dict) else None
    curve = [row[name] for row in read_curves(run) if name in row]
    return float(value) if isinstance(value, int | float) else next(reversed(curve), None)
