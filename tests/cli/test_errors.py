"""Messages and exit codes of exceptions; tests/contract has those of wrong command lines."""

from __future__ import annotations

import errno
import os
import signal
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from cifar_lit.base.errors import Failure, UsageError
from cifar_lit.cli.errors import explain_error
from cifar_lit.training.orderly_stop import Interrupted
from cifar_lit.training.rows import NotFiniteLoss

OUT_OF_MEMORY = "out of memory: halve --batch-size or --data.eval_batch_size"
NO_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "ALLOC_FAILED", "unable to find an engine")
DISK_FULL = "the disk is full ({}): free some space, then try again"
NO_SPACE = OSError(errno.ENOSPC, "No space left on device", "metrics.csv")
# torch's file writer raises a RuntimeError in place of the OSError.
NO_SPACE_IN_TORCH: Any = RuntimeError("[enforce fail at inline_container.cc:671] . unexpected pos 602240 vs 602132")
NO_SPACE_IN_TORCH.__context__ = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
NO_PERMISSION = r"no permission for /a\nb: choose another folder with --logs or --data-dir"
LOST_PEER = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3511")
RESUMABLE = Interrupted(signal.SIGINT)
RESUMABLE.resume = "python scripts/train.py --resume lightning_logs/small-1"
NOT_FINITE = (
    "the training was stopped, and its checkpoints are intact: start again with a lower --lr, or resume with "
    "--precision 32-true"
)


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (UsageError("no. Use yes."), "no. Use yes.", 2),
        (Failure("the mirror is gone: try another"), "the mirror is gone: try another", 1),
        (ValueError("two is\nnot one"), "two is", 2),
        (MisconfigurationException("you cannot"), "you cannot", 2),
        (KeyError("x"), "KeyError: 'x' (--debug shows where)", 1),
        (RuntimeError(), "RuntimeError: RuntimeError (--debug shows where)", 1),
        (KeyboardInterrupt(), "stopped", 130),
        (Interrupted(signal.SIGTERM), "stopped", 143),
        (RESUMABLE, f"stopped. Resume with:\n  {RESUMABLE.resume}", 130),
        (NotFiniteLoss("the loss is nan at step 7"), f"the loss is nan at step 7; {NOT_FINITE}", 1),
        (torch.OutOfMemoryError("CUDA out of memory."), f"{OUT_OF_MEMORY}, or choose a smaller --net", 1),
        *((RuntimeError(f"… {text} …"), f"{OUT_OF_MEMORY}, or choose a smaller --net", 1) for text in NO_MEMORY),
        (NO_SPACE, DISK_FULL.format("metrics.csv"), 1),
        (NO_SPACE_IN_TORCH, DISK_FULL.format("while writing"), 1),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "a"), DISK_FULL.format("a"), 1),
        (PermissionError(13, "no", "/a\nb"), NO_PERMISSION, 1),
        (LOST_PEER, "another process of this run ended early: see its message for the reason", 1),
        (Failure("\x1b[2Jname"), "\\x1b[2Jname", 1),  # escaped: file names must not control the terminal
    ],
)
def test_an_exception_becomes_a_message_and_an_exit_code(error: BaseException, line: str, code: int) -> None:
    text, exit_code = explain_error(error)
    assert (text.lstrip("\n"), exit_code) == (f"cifar-lit: {line}", code)


@pytest.mark.parametrize("variable", ["RANK", "LOCAL_RANK"])
def test_other_ranks_do_not_repeat_the_message_of_rank_0(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    assert explain_error(UsageError("no"))[0] == "[rank 1] cifar-lit: no"  # an error of this rank alone
    assert [explain_error(error)[0] for error in (LOST_PEER, Interrupted(signal.SIGINT))] == ["", ""]
    monkeypatch.setenv(variable, "0")
    assert explain_error(LOST_PEER)[0].startswith("cifar-lit: ")
