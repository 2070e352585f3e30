"""Messages and exit codes of exceptions; tests/contract has those of wrong command lines."""

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
from cifar_lit.training.checks import NotFiniteLoss
from cifar_lit.training.orderly_stop import Interrupted

OUT_OF_MEMORY = "out of memory: halve --batch-size or --data.eval_batch_size"
NO_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "ALLOC_FAILED", "unable to find an engine")
DISK_FULL = "the disk is full ({}): free some space, then {}"
NO_SPACE = OSError(errno.ENOSPC, "No space left on device", "metrics.csv")
# torch's file writer raises a RuntimeError in place of the OSError. This run has a checkpoint.
NO_SPACE_IN_TORCH: Any = RuntimeError("[enforce fail at inline_container.cc:671] . unexpected pos 602240 vs 602132")
NO_SPACE_IN_TORCH.__context__ = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
NO_SPACE_IN_TORCH.resume = "cifar-lit train --resume lightning_logs/small-1"
NO_PERMISSION = r"no permission for /a\nb: choose another folder with --logs or --data-dir"
NO_TEXT = UnicodeEncodeError("utf-8", "a\udcff", 1, 2, "surrogates not allowed")
NO_HOME = "a path begins with an unknown home folder: write the path out"
OTHER_BUILD = "torch and torchvision are of different builds: uninstall both, then install both from one source"
LOST_PEER = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3511")
RESUMABLE = Interrupted(signal.SIGINT)
RESUMABLE.resume = "python scripts/train.py --resume lightning_logs/small-1"
NOT_FINITE = (
    "stopped before it reached the weights. Checkpoints are intact: start again with a lower --lr, or resume with "
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
        (RuntimeError("Could not determine home directory."), NO_HOME, 2),
        (ValueError("embedded null byte"), "a path contains a NUL character: check the path", 2),
        (NO_TEXT, "a name is no valid text (UTF-8): rename the file or folder", 2),
        (KeyboardInterrupt(), "stopped", 130),
        (Interrupted(signal.SIGTERM), "stopped", 143),
        (RESUMABLE, f"stopped. Resume with:\n  {RESUMABLE.resume}", 130),
        (NotFiniteLoss("the loss is nan at step 7"), f"the loss is nan at step 7; {NOT_FINITE}", 1),
        (torch.OutOfMemoryError("CUDA out of memory."), f"{OUT_OF_MEMORY}, or choose a smaller --net", 1),
        *((RuntimeError(f"… {text} …"), f"{OUT_OF_MEMORY}, or choose a smaller --net", 1) for text in NO_MEMORY),
        (NO_SPACE, DISK_FULL.format("metrics.csv", "start again"), 1),
        (NO_SPACE_IN_TORCH, DISK_FULL.format("while writing", "resume with --resume"), 1),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "a"), DISK_FULL.format("a", "start again"), 1),
        (PermissionError(13, "no", "/a\nb"), NO_PERMISSION, 1),
        (RuntimeError("operator torchvision::nms does not exist"), OTHER_BUILD, 1),
        (
            LOST_PEER,
            "another process of this run ended early: see its message for the reason. Resume with --resume.",
            1,
        ),
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
