"""What ended a command, as a line and an exit code; lines for what is typed are in tests/contract."""

from __future__ import annotations

import errno
import os
import signal
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from cifar_lit.cli.errors import explain_error
from cifar_lit.errors import Failure, UsageError
from cifar_lit.training.callbacks import NotFiniteLoss
from cifar_lit.training.orderly_stop import Interrupted

OUT_OF_MEMORY = "out of memory: halve --batch-size or --data.eval_batch_size, use --auto-batch"
ELSEWHERE = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "ALLOC_FAILED",
    "unable to find an engine to execute",
)
DISK_FULL = "the disk is full ({}): free some space, then {}"


def hidden_in_a_runtime_error(number: int) -> RuntimeError:
    """An error of torch's file writer, in a run that has a checkpoint."""
    error: Any = RuntimeError("[enforce fail at inline_container.cc:671] . unexpected pos 602240 vs 602132")
    error.__context__ = OSError(number, os.strerror(number))
    error.resume = "cifar-lit train --resume lightning_logs/small-1"
    return error


NO_HOME = "a path begins with an unknown home folder: write the path out"
LOST_PEER = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3511")
RESUMABLE = Interrupted(signal.SIGINT)
RESUMABLE.resume = "python scripts/train.py --resume lightning_logs/small-1"
NOT_FINITE = "stopped before it reached the weights. Checkpoints are intact: lower --lr, or try --precision 32-true"


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
        (RESUMABLE, f"stopped. Resume with:\n  {RESUMABLE.resume}", 130),
        (NotFiniteLoss("the loss is nan at step 7"), f"the loss is nan at step 7; {NOT_FINITE}", 1),
        (torch.OutOfMemoryError("CUDA out of memory."), f"{OUT_OF_MEMORY}, or choose a smaller --net", 1),
        *((RuntimeError(f"… {text} …"), f"{OUT_OF_MEMORY}, or choose a smaller --net", 1) for text in ELSEWHERE),
        (
            OSError(errno.ENOSPC, "No space left on device", "metrics.csv"),
            DISK_FULL.format("metrics.csv", "start again"),
            1,
        ),
        (hidden_in_a_runtime_error(errno.ENOSPC), DISK_FULL.format("while writing", "resume with --resume"), 1),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "a"), DISK_FULL.format("a", "start again"), 1),
        (
            PermissionError(13, "no", "/a\nb"),
            r"no permission for /a\nb: choose another folder with --logs or --data-dir",
            1,
        ),
        (LOST_PEER, "another process of this run ended early; its message gives the reason. Resume with --resume.", 1),
        (Failure("\x1b[2Jname"), "\\x1b[2Jname", 1),  # names out of files must not move a terminal's cursor
    ],
)
def test_what_ended_a_command_becomes_a_line_and_an_exit_code(error: BaseException, line: str, code: int) -> None:
    text, exit_code = explain_error(error)
    assert (text.lstrip("\n"), exit_code) == (f"cifar-lit: {line}", code)


@pytest.mark.parametrize("variable", ["RANK", "LOCAL_RANK"])
def test_further_processes_of_a_run_repeat_nothing(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    assert explain_error(UsageError("no"))[0] == "[rank 1] cifar-lit: no"  # of this process alone: told nowhere else
    assert [explain_error(error)[0] for error in (LOST_PEER, Interrupted(signal.SIGINT))] == ["", ""]
    monkeypatch.setenv(variable, "0")
    assert explain_error(LOST_PEER)[0].startswith("cifar-lit: ")
