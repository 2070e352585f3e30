"""The table of what is typed, the line on stderr, and the exit code: 2 for what was typed, 1 for what failed."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest
import torch
from command_line import draw_folder, refused, typed
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import cifar_lit.hardware
from cifar_lit.cli.errors import explain_error
from cifar_lit.errors import Failure, UsageError
from cifar_lit.hardware import Machine
from cifar_lit.training.callbacks import Interrupted, NotFiniteLoss

S = "--recipe small.yaml"
OWN = "--data.num_classes null --data.image_size null"  # over what the recipe says of its shapes
TWO_CLASSES = {"train/cat": 3, "train/dog": 3, "test/cat": 2, "test/dog": 2}
NO_GPU = "this machine has no GPU, a CPU with 4 threads"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines are those of a machine without GPUs, wherever the tests run."""
    monkeypatch.setattr(cifar_lit.hardware, "detect_machine", lambda: Machine(cpu="a CPU", threads=4, bf16=False))


TYPED: list[tuple[str, str]] = [
    # names
    ("trian", "no command is called 'trian'. Did you mean train? There are fit, train, …"),
    (f"{S} --model.optimzer sgd", "there is no flag --model.optimzer. Did you mean --model.optimizer?"),
    (f"{S} --data.seed 3", "data.seed follows from --seed: leave it out"),
    ("recipes --all", "recipes knows no flag --all: use `cifar-lit recipes` or `cifar-lit recipes NAME`"),
    ("devices --net lenett", "There is no net named 'lenett'. Did you mean lenet? There are …"),
    ("devices --nte lenet", "there is no flag --nte. Did you mean --net?"),
    # abbreviations
    # values
    (f"{S} --epochs", "--epochs needs a value, as in --epochs 10"),
    (f"{S} --model.lr", "--model.lr needs a value"),
    (f"{S} --lr fast", "--lr (model.lr) must be a number, not fast"),
    (f"{S} --data.shuffle 3", "data.shuffle must be true or false, not 3"),
    (f"{S} --trainer.deterministic wran", "trainer.deterministic must be one of true, false, warn, not wran. Did you mean warn?"),
    (f"{S} --model.schedule cosin", "model.schedule must be one of constant, cosine, …, not 'cosin'. Did you mean cosine?"),
    (f"{S} --trainer.callbacks EarlyStoping", "trainer.callbacks: no class is called EarlyStoping; give its full path, …"),
    (f"{S} --trainer.callbacks EarlyStopping --trainer.callbacks.mod=x", "trainer.callbacks: EarlyStopping has no setting mod"),
    # numbers that cannot be meant
    (f"{S} --data.eval_batch_size 0", "data.eval_batch_size must be at least 1, not 0"),
    (f"{S} --devices 2 --accelerator cpu --trainer.strategy ddp_fork", "--trainer.strategy ddp_fork is for …: use ddp"),
    (f"{S} --model.width 0", "width multiplies the hidden widths, so it must be above 0, not 0.0."),
    (f"{S} --data.val_size 200", "data.val_size 200 must leave some of the 200 images to train on"),
    (f"{S} --data.val_size 0.001", "data.val_size 0.001 of 200 images is none: raise it, or use 0 to train on all"),
    (f"{S} --data.count 3", "data.count must be at least 10 images"),
    # files of settings
    (f"{S} --config top.yaml", "no setting is called trainr.max_epochs. Did you mean trainer.max_epochs?"),
    # devices
    (f"{S} --accelerator gpu", f"{NO_GPU}: leave --accelerator out, or use --accelerator cpu"),
    (f"{S} --devices 0,1", f"--devices 0,1 names GPUs, but {NO_GPU}: --devices 2 runs two processes on it"),
    # checkpoints
    ("test", "which weights? Name a checkpoint: --ckpt_path lightning_logs/NAME/checkpoints/best.ckpt"),
    ("test --ckpt_path nowhere.ckpt", "there is no checkpoint nowhere.ckpt"),
    (f"test {S} --ckpt_path last", "there is no checkpoint last"),
    (f"test {S} --resume", "--resume goes on with a training; `test` takes --ckpt_path PATH"),
    ("--resume loose.ckpt", "loose.ckpt lies in no run folder: --resume takes a run, or a checkpoint in its checkpoints/"),
    # folders
    (f"{S} --dataset folder", "the data set `folder` needs --data-dir PATH, which holds train/<class>/… and test/<class>/…"),
    (f"{S} --dataset folder --data-dir nowhere", "nowhere does not exist: --data-dir must name a folder with ROOT/train/…"),
    (f"{S} --dataset folder --data-dir empty", "empty has no class folders: want ROOT/train/…"),
    (f"{S} --dataset folder --data-dir lone", "lone has one class only (cat), a classifier needs two or more."),
    (
        f"{S} --dataset folder --data-dir unlike",
        "the classes below unlike differ: train/ alone has dog and test/ alone has cow; both need a folder for every class",
    ),
    (f"{S} --dataset folder --data-dir tiny {OWN}", "lenet cannot take 8×8 images; the least size is 16×16."),
]  # fmt: skip


@pytest.fixture
def files(here: Path) -> Path:
    """The files that the rows of the table name."""
    for name, text in {
        "top.yaml": "trainr:\n  max_epochs: 3\n",
        "loose.ckpt": "",
    }.items():
        (here / name).write_text(text)
    (here / "empty").mkdir()
    draw_folder(here / "lone", {"cat": 3})
    draw_folder(here / "unlike", {"train/cat": 2, "train/dog": 2, "test/cat": 2, "test/cow": 2})
    draw_folder(here / "tiny", TWO_CLASSES, size=8)
    return here


@pytest.mark.parametrize(("words", "line"), TYPED, ids=[words.replace(S, "…") for words, _ in TYPED])
def test_what_cannot_be_meant_is_answered_in_one_line_and_leaves_no_run(files: Path, words: str, line: str) -> None:
    refused(typed(*words.split()), f"cifar-lit: {line}", 2)
    assert not (files / "lightning_logs").exists()


@pytest.mark.parametrize("words", ["--epochs many", "--dataset folder"])
def test_debug_shows_the_traceback_before_the_line(files: Path, words: str) -> None:
    plain, debugged = typed(*S.split(), *words.split()), typed(*S.split(), *words.split(), "--debug")
    assert "Traceback (most recent call last):" in debugged.err
    assert "UsageError" in debugged.err
    assert debugged.complaints[-1:] == plain.complaints
    assert debugged.code == plain.code == 2


# ---- what fails


def test_logs_that_cannot_be_written_are_told(here: Path) -> None:
    answer = typed(*S.split(), "--logs", "small.yaml/runs")
    line = "cifar-lit: cannot make a run folder in small.yaml/runs: Not a directory. Choose another with --logs DIR."
    refused(answer, line, 1)


@pytest.mark.skipif(getattr(os, "geteuid", lambda: 0)() == 0, reason="root may write everywhere")
def test_logs_without_permission_are_told(here: Path) -> None:
    (here / "closed").mkdir(mode=0o500)
    refused(
        typed(*S.split(), "--logs", "closed/runs"), "cifar-lit: cannot make a run folder in closed/runs: Permission denied. …", 1
    )


# ---- from an exception to the line

OUT_OF_MEMORY = "out of memory: lower --batch-size or data.eval_batch_size, or choose a smaller --net"
DISK_FULL = "the disk is full ({}): free some space, then go on with --resume"
NO_HOME = "a path begins with a home that is not on this machine: write the path out"
NO_MEMORY = ("CUDA out of memory. Tried to allocate 20 GiB", "DefaultCPUAllocator: can't allocate memory: you tried")
LOST_PEER = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3511")
RESUMABLE = Interrupted(signal.SIGINT)
RESUMABLE.resume = "python scripts/train.py --resume lightning_logs/small-1"
NOT_FINITE = "stopped before it reached the weights. Checkpoints of before are intact: lower --lr, or try --precision 32-true"


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (UsageError("no. Use yes."), "no. Use yes.", 2),
        (Failure("the mirror is gone: try another"), "the mirror is gone: try another", 1),
        (ValueError("two is\nnot one"), "two is", 2),
        (MisconfigurationException("you cannot"), "you cannot", 2),
        (KeyError("x"), "KeyError: 'x' (--debug shows where)", 1),
        (RuntimeError(), "RuntimeError: RuntimeError (--debug shows where)", 1),
        (RuntimeError("Could not determine home directory."), NO_HOME, 2),
        (KeyboardInterrupt(), "stopped", 130),
        (Interrupted(signal.SIGTERM), "stopped", 143),
        (RESUMABLE, f"stopped. Go on with:\n  {RESUMABLE.resume}", 130),
        (NotFiniteLoss("the loss is nan at step 7"), f"the loss is nan at step 7; {NOT_FINITE}", 1),
        (torch.OutOfMemoryError(NO_MEMORY[0]), OUT_OF_MEMORY, 1),
        (RuntimeError(NO_MEMORY[1]), OUT_OF_MEMORY, 1),
        (OSError(errno.ENOSPC, "No space left on device", "metrics.csv"), DISK_FULL.format("metrics.csv"), 1),
        (OSError(errno.ENOSPC, "No space left on device"), DISK_FULL.format("while writing"), 1),
        (PermissionError(13, "no", "/data"), "no permission for /data: choose another folder with --logs or --data-dir", 1),
        (LOST_PEER, "another process of this run ended early; what it printed says why. Go on with --resume.", 1),
    ],
)
def test_what_ended_a_command_becomes_a_line_and_an_exit_code(error: BaseException, line: str, code: int) -> None:
    said, exit_code = explain_error(error)
    assert (said.lstrip("\n"), exit_code) == (f"cifar-lit: {line}", code)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UsageError("no"), "[rank 1] cifar-lit: no"),  # a failure of this process alone would be told nowhere else
        (LOST_PEER, ""),
        (Interrupted(signal.SIGINT), ""),
    ],
)
@pytest.mark.parametrize("variable", ["RANK", "LOCAL_RANK"])
def test_further_processes_of_a_run_repeat_nothing(
    monkeypatch: pytest.MonkeyPatch, variable: str, error: BaseException, line: str
) -> None:
    monkeypatch.setenv(variable, "1")
    assert explain_error(error)[0] == line
    monkeypatch.setenv(variable, "0")
    assert explain_error(error)[0].startswith("cifar-lit: ")
