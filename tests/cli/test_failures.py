from __future__ import annotations

import errno
import signal

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from cifar_lit.cli.errors import explain_error
from cifar_lit.errors import Failure, UsageError
from cifar_lit.training.callbacks import Interrupted
from cifar_lit.training.step import NotFiniteLoss

LOST_PEER = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3511")


def resumable(number: int) -> Interrupted:
    error = Interrupted(number)
    error.resume = "python scripts/train.py --resume lightning_logs/small-1"
    return error


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (UsageError("no. Use yes."), "cifar-lit: no. Use yes.", 2),
        (Failure("the mirror is gone: try another"), "cifar-lit: the mirror is gone: try another", 1),
        (ValueError("two is\nnot one"), "cifar-lit: two is", 2),
        (MisconfigurationException("you cannot"), "cifar-lit: you cannot", 2),
        (KeyError("x"), "cifar-lit: KeyError: 'x' (--debug shows where)", 1),
        (RuntimeError(), "cifar-lit: RuntimeError: RuntimeError (--debug shows where)", 1),
        (
            RuntimeError("Could not determine home directory."),
            "cifar-lit: a path begins with a home that is not on this machine: write the path out",
            2,
        ),
        (KeyboardInterrupt(), "\ncifar-lit: stopped", 130),
        (Interrupted(signal.SIGINT), "cifar-lit: stopped", 130),
        (Interrupted(signal.SIGTERM), "cifar-lit: stopped", 143),
        (
            resumable(signal.SIGINT),
            "cifar-lit: stopped. Go on with:\n  python scripts/train.py --resume lightning_logs/small-1",
            130,
        ),
        (
            NotFiniteLoss("the loss is nan at step 7 of epoch 0"),
            "cifar-lit: the loss is nan at step 7 of epoch 0; stopped before it reached the weights. "
            "Checkpoints of before are intact: lower --lr, or try --precision 32-true",
            1,
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
            "cifar-lit: out of memory: lower --batch-size or data.eval_batch_size, or choose a smaller --net",
            1,
        ),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried"),
            "cifar-lit: out of memory: lower --batch-size or data.eval_batch_size, or choose a smaller --net",
            1,
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/metrics.csv"),
            "cifar-lit: the disk is full (runs/metrics.csv): free some space, then go on with --resume",
            1,
        ),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "cifar-lit: the disk is full (while writing): free some space, then go on with --resume",
            1,
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "/data"),
            "cifar-lit: no permission for /data: choose another folder with --logs or --data-dir",
            1,
        ),
        (
            LOST_PEER,
            "cifar-lit: another process of this run ended early; what it printed says why. Go on with --resume.",
            1,
        ),
    ],
)
def test_what_ended_a_command_becomes_a_line_and_an_exit_code(error: BaseException, line: str, code: int) -> None:
    assert explain_error(error) == (line, code)


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
