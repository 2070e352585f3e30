"""Runs that are gone on with although something of them is damaged or left over, and one that has ended meanwhile."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.command_line import assert_refused, copy_run, metrics_of, run_command
from filelock import FileLock

from cifar_lit.cli.fit import RESUMED_CHECKPOINT, validate_resume
from cifar_lit.cli.flags import parse
from cifar_lit.files import PART
from cifar_lit.training.checkpoint import read_checkpoint


@pytest.fixture
def unfinished(run_dir: Path) -> Path:
    """A run of one's own that could be resumed."""
    run = copy_run(run_dir)
    (run / "metrics.json").unlink()
    return run


def cut_short(checkpoint: Path) -> None:
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1000])


def test_the_last_whole_checkpoint_takes_the_place_of_a_damaged_one(unfinished: Path, run_dir: Path) -> None:
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


def test_further_processes_resume_from_the_checkpoint_that_the_first_one_chose(
    unfinished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RESUMED_CHECKPOINT, "")
    checkpoints, command = unfinished / "checkpoints", parse("train", ["--resume", str(unfinished)])
    cut_short(checkpoints / "last.ckpt")
    chosen, step = validate_resume(checkpoints / "last.ckpt", command, first=True)
    assert chosen == checkpoints / "best.ckpt"
    shutil.copy(chosen, checkpoints / "last.ckpt")  # whole again, as on a file system that shows changes late
    assert Path(os.environ[RESUMED_CHECKPOINT]) == chosen
    assert validate_resume(Path(os.environ[RESUMED_CHECKPOINT]), command, first=False) == (chosen, step)


def test_a_file_with_weights_alone_cannot_be_resumed(unfinished: Path) -> None:
    last = unfinished / "checkpoints/last.ckpt"
    torch.save({"state_dict": read_checkpoint(last)["state_dict"]}, last)
    assert_refused(run_command("--resume", last), 2, "last.ckpt holds weights only")


def test_a_damaged_checkpoint_that_has_no_substitute_is_named(unfinished: Path) -> None:
    last = unfinished / "checkpoints/last.ckpt"
    cut_short(last)
    named = run_command("--resume", last)
    assert_refused(named, 1, "last.ckpt is cut short or damaged (", "): use another checkpoint")  # it was named itself
    for path in (unfinished / "checkpoints").iterdir():
        path.write_bytes(b"")
    assert_refused(run_command("--resume"), 1, "last.ckpt cannot be read (the file is empty): use another checkpoint")
    assert not list(unfinished.glob(".*"))


def test_a_run_goes_on_from_its_previous_checkpoint_and_only_what_a_kill_left_half_written_goes(
    unfinished: Path,
) -> None:
    (unfinished / "checkpoints/last.ckpt").rename(unfinished / "checkpoints/previous.ckpt")
    left = [unfinished / f"checkpoints/last.ckpt{PART}", unfinished / f"metrics.json{PART}"]
    own = [unfinished / "notes.part", unfinished / "checkpoints/mine.ckpt"]
    for path in (*left, *own):
        path.write_text("text")
    answer = run_command("--resume")
    assert (answer.code, answer.err) == (0, "")
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in own)


def test_a_run_that_came_to_its_end_while_this_one_started_is_not_run_again(
    unfinished: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire = FileLock.acquire

    def acquire_late(lock: FileLock, **kept: Any) -> Any:
        shutil.copy(run_dir / "metrics.json", unfinished / "metrics.json")
        return acquire(lock, **kept)

    monkeypatch.setattr(FileLock, "acquire", acquire_late)
    assert_refused(run_command("--resume"), 2, f"{unfinished} is finished: its results are in ")
    assert not list(unfinished.glob(".*"))
