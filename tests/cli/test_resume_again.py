"""Resuming runs with damaged checkpoints or left-over files, and a run that has just ended."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from contract.command_line import assert_refused, copy_run, metrics_of, run_command
from filelock import FileLock
from jsonargparse import Namespace

from cifar_lit.base.files import PART
from cifar_lit.cli.fit import RESUMED_CHECKPOINT, resumed_checkpoint, starting_checkpoint
from cifar_lit.cli.flags import parse
from cifar_lit.training.checkpoint import DamagedCheckpoint, read_checkpoint


@pytest.fixture
def unfinished(run_dir: Path) -> Path:
    """Return a copy of the run without its results, so that it can be resumed."""
    run = copy_run(run_dir)
    (run / "metrics.json").unlink()
    return run


def cut_short(checkpoint: Path) -> None:
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1000])


def test_a_damaged_checkpoint_is_replaced_by_the_latest_intact_one(unfinished: Path, run_dir: Path) -> None:
    last = unfinished / "checkpoints/last.ckpt"
    cut_short(last)
    answer = run_command("--resume")
    assert answer.code == 0
    (line,) = answer.error_lines
    assert line.startswith(f"{last} is cut short or damaged (")
    assert f"): resuming {unfinished}/checkpoints/best.ckpt of step " in line
    for part in ("val", "test"):
        assert metrics_of(unfinished)[part] == metrics_of(run_dir)[part]
    assert read_checkpoint(last)["global_step"] == read_checkpoint(run_dir / "checkpoints/last.ckpt")["global_step"]


def test_other_processes_resume_from_the_same_checkpoint(unfinished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RESUMED_CHECKPOINT, "")
    checkpoints, command = unfinished / "checkpoints", parse("train", ["--resume", str(unfinished)])
    cut_short(checkpoints / "last.ckpt")
    path, _ = starting_checkpoint(command, Namespace(), checkpoints / "last.ckpt", first=True)
    assert path == checkpoints / "best.ckpt"
    shutil.copy(path, checkpoints / "last.ckpt")  # intact again, as on a file system with delayed visibility
    assert resumed_checkpoint(command, first=False) == path
    assert starting_checkpoint(command, Namespace(), path, first=False)[0] == path
    cut_short(path)
    with pytest.raises(DamagedCheckpoint):  # no other choice than that of the first process
        starting_checkpoint(command, Namespace(), path, first=False)


def test_a_damaged_checkpoint_without_an_alternative_is_an_error(unfinished: Path) -> None:
    last = unfinished / "checkpoints/last.ckpt"
    cut_short(last)
    answer = run_command("--resume", last)  # a checkpoint given by path is not replaced
    assert_refused(answer, 1, "last.ckpt is cut short or damaged (", "): use another checkpoint")
    for path in (unfinished / "checkpoints").iterdir():
        path.write_bytes(b"")
    assert_refused(run_command("--resume"), 1, "last.ckpt is cut short or damaged (")
    assert not list(unfinished.glob(".*"))


def test_a_run_resumes_from_previous_ckpt_and_removes_only_partial_files(unfinished: Path) -> None:
    (unfinished / "checkpoints/last.ckpt").rename(unfinished / "checkpoints/previous.ckpt")
    partial = [unfinished / f"checkpoints/last.ckpt{PART}", unfinished / f"metrics.json{PART}"]
    own = [unfinished / "notes.part", unfinished / "checkpoints/mine.ckpt"]
    for path in (*partial, *own):
        path.write_text("text")
    answer = run_command("--resume")
    assert (answer.code, answer.err) == (0, "")
    assert not any(path.exists() for path in partial)
    assert all(path.exists() for path in own)


def test_a_run_that_finishes_while_resume_waits_for_its_lock_is_not_resumed(
    unfinished: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire = FileLock.acquire

    def acquire_late(lock: FileLock, **arguments: Any) -> Any:
        shutil.copy(run_dir / "metrics.json", unfinished / "metrics.json")
        return acquire(lock, **arguments)

    monkeypatch.setattr(FileLock, "acquire", acquire_late)
    assert_refused(run_command("--resume"), 2, f"{unfinished} is finished: its results are in ")
    assert not list(unfinished.glob(".*"))
