"""Checkpoints that cannot be used, and runs that cannot be gone on with: one line, and all files as they were."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import refused, typed
from filelock import FileLock


def test_a_run_that_is_finished_is_named_and_left_as_it_is(run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    line = f"cifar-lit: {run} is finished: its results are in {run}/metrics.json. Start a new run without --resume."
    for words in (["--resume", run], ["--resume", run / "checkpoints/last.ckpt"], ["--resume", "--logs", run.parent]):
        refused(typed(*words), line, 2)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_a_resumed_run_keeps_its_recipe(here: Path, run: Path) -> None:
    shutil.copytree(run, here / "copy")
    (here / "copy/metrics.json").unlink()
    line = "cifar-lit: --resume goes on with the recipe of copy: leave --recipe out"
    refused(typed("--resume", "copy", "--recipe", "small.yaml"), line, 2)


@pytest.mark.parametrize(
    ("flags", "other"),
    [
        (["--net", "tudui"], "tudui (3×16×16, 4 classes)"),
        (["--data.num_classes", "5"], "lenet (3×16×16, 5 classes)"),
        (["--model.width", "2"], "lenet width 2 (3×16×16, 4 classes)"),
        (["--data.image_size", "20"], "lenet (3×20×20, 4 classes)"),
    ],
)
def test_a_checkpoint_of_another_net_is_told_with_both_nets(here: Path, run: Path, flags: list[str], other: str) -> None:
    checkpoint = run / "checkpoints/best.ckpt"
    line = f"cifar-lit: {checkpoint} holds weights of lenet (3×16×16, 4 classes), not of {other}: …"
    refused(typed("test", "--ckpt_path", checkpoint, *flags), line, 1)
    assert not (here / "lightning_logs").exists()


def cut(content: bytes, path: Path) -> None:
    path.write_bytes(content[: len(content) // 2])


def emptied(content: bytes, path: Path) -> None:
    path.write_bytes(b"")


def replaced_by_text(content: bytes, path: Path) -> None:
    path.write_text("no checkpoint at all\n")


def without_weights(content: bytes, path: Path) -> None:
    torch.save({"epoch": 3}, path)


@pytest.fixture
def unfinished(here: Path, run: Path) -> Path:
    """A run folder of one's own that could be resumed."""
    shutil.copytree(run, here / "copy")
    (here / "copy/metrics.json").unlink()
    return here / "copy"


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (cut, "copy/checkpoints/last.ckpt is cut short or damaged (…): use another checkpoint"),
        (emptied, "copy/checkpoints/last.ckpt is cut short or damaged (…): use another checkpoint"),
        (replaced_by_text, "copy/checkpoints/last.ckpt is no checkpoint, or is damaged: use another one"),
        (without_weights, "copy/checkpoints/last.ckpt is no Lightning checkpoint: it holds no state_dict"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_stays(here: Path, unfinished: Path, damage: Any, line: str) -> None:
    last = unfinished / "checkpoints/last.ckpt"
    damage(last.read_bytes(), last)
    damaged = last.read_bytes()
    for words in (["test", "--ckpt_path"], ["--resume"]):
        refused(typed(*words, "copy/checkpoints/last.ckpt"), f"cifar-lit: {line}", 1)
    assert last.read_bytes() == damaged
    assert not (here / "lightning_logs").exists()


class Gadget:
    """Makes a folder when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_checkpoint_that_would_execute_code_is_refused_and_nothing_runs(here: Path, unfinished: Path, zipped: bool) -> None:
    last = unfinished / "checkpoints/last.ckpt"
    contents = torch.load(last, weights_only=True)
    torch.save({**contents, "hyper_parameters": Gadget(here / "ran")}, last, _use_new_zipfile_serialization=zipped)
    line = "cifar-lit: copy/checkpoints/last.ckpt was not loaded: it would execute code. Use checkpoints that hold weights only."
    for command in ("test", "validate", "predict"):
        refused(typed(command, "--ckpt_path", "copy/checkpoints/last.ckpt"), line, 1)
    refused(typed("--resume", "copy"), line, 1)
    refused(typed("--resume", "copy", "--trainer.max_epochs", "5", "--weights_only", "false"), line, 1)
    assert not (here / "ran").exists()
    torch.load(last, weights_only=False)
    assert (here / "ran").exists(), "the gadget is no threat, so that nothing was tested"


def test_a_folder_that_another_process_writes_is_left_alone(unfinished: Path) -> None:
    with FileLock(unfinished / ".lock"):
        answer = typed("--resume", "copy")
    refused(answer, "cifar-lit: another process is writing …copy: wait until it ends, or start a new run without --resume", 1)
