"""Find the run to resume, and the checkpoint that it continues from."""

from __future__ import annotations

from pathlib import Path

from cifar_lit.base.errors import UsageError
from cifar_lit.base.files import display_path
from cifar_lit.base.text import note
from cifar_lit.run.record import read_metrics, scores_of

JOB = ".job"  # scheduler job that started the run
PREVIOUS = "checkpoints/previous.ckpt"
CHECKPOINTS = ("checkpoints/last.ckpt", PREVIOUS, "checkpoints/best.ckpt")  # in order of preference for a resume


def find_resumable(logs: Path, name: str, needs_test: bool, first: bool = True) -> Path:
    """Return the checkpoint that `--resume` continues from.

    Args:
        name: a checkpoint, a run folder, or "" for the newest training in `logs` that has a checkpoint and is not
            finished, if there is one.
        needs_test: see `is_finished`.
        first: whether this is the run's first process, which prints a note.

    Raises:
        UsageError: there is no checkpoint.
    """
    path = Path(name).expanduser()
    if not name:
        path = _newest_run(logs, needs_test, first)
    checkpoint = path
    if path.is_dir():
        checkpoint = newest_checkpoint(path)
    if not checkpoint.is_file():
        raise UsageError(
            f"nothing to resume: there is no checkpoint {display_path(checkpoint)}. "
            "Name another run, or start one without --resume."
        )
    return checkpoint


def _newest_run(logs: Path, needs_test: bool, first: bool) -> Path:
    trained = [folder.parent for folder in logs.glob("*/checkpoints") if (folder.parent / "config.yaml").is_file()]
    if not trained:
        raise UsageError(f"nothing to resume: {logs} holds no run with checkpoints. Start one without --resume.")
    trained.sort(key=_started, reverse=True)
    newest = trained[0]
    for run in trained:
        if is_finished(run, needs_test) or not newest_checkpoint(run).is_file():
            continue
        if run != newest and first:
            reason = "is finished or has no checkpoint"
            note(f"resuming {display_path(run)}: the newest run, {display_path(newest)}, {reason}")
        return run
    return newest


def newest_run_of_job(logs: Path, job: str) -> Path | None:
    """Return the newest run, finished or resumable, with this record of its job."""
    runs = []
    for record in logs.glob(f"*/{JOB}"):
        run = record.parent
        if record.read_text() != job:
            continue
        if read_metrics(run) or newest_checkpoint(run).is_file():
            runs.append((_started(run), run))
    if not runs:
        return None
    return max(runs)[1]


def _started(run: Path) -> float:
    """Return when a run was started or resumed: the modification time of its config.yaml."""
    return (run / "config.yaml").stat().st_mtime


def newest_checkpoint(run: Path) -> Path:
    """Return the checkpoint to resume from; the path of last.ckpt if there is none."""
    for name in CHECKPOINTS:
        if (run / name).is_file():
            return run / name
    return run / CHECKPOINTS[0]


def run_of(checkpoint: Path) -> Path | None:
    """Return the run folder that contains a checkpoint, or None."""
    folder = checkpoint.resolve().parent
    if folder.name == "checkpoints" and (folder.parent / "config.yaml").is_file():
        return folder.parent
    return None


def is_finished(run: Path, needs_test: bool) -> bool:
    """Return whether a run has nothing left to do. needs_test: the command ends with a test."""
    metrics = read_metrics(run)
    if needs_test:
        return bool(scores_of(metrics))
    return bool(metrics)


def check_unfinished(run: Path, needs_test: bool) -> None:
    """Raise UsageError if a run is finished, see `is_finished`."""
    if is_finished(run, needs_test):
        results = display_path(run / "metrics.json")
        raise UsageError(
            f"{display_path(run)} is finished: its results are in {results}. "
            "Start a new run without --resume; --weights RUN trains the weights of this one on."
        )
