"""Known failures as one line and an exit code."""

from __future__ import annotations

import errno
import os
import re

from cifar_lit.cli.launched import starts_again
from cifar_lit.errors import Failure, UsageError, first_line

_CONTROL = re.compile(r"[^\S\n ]|[\x00-\x08\x0e-\x1f\x7f-\x9f]")
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "NCCL",
    "Broken pipe",
    "recvValue failed",
    "Socket Timeout",
)


def explain(error: BaseException) -> tuple[str, int]:
    """What to print (nothing when empty) and the exit code for anything that ended a command."""
    line, code = _explain(error)
    line = _CONTROL.sub(lambda found: repr(found[0])[1:-1], line)  # names out of files must not move a terminal's cursor
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"
    if rank != "0" and line:
        line = "" if is_lost_peer(error) or code >= 128 else f"[rank {rank}] {line}"
    return line, code


def _explain(error: BaseException) -> tuple[str, int]:
    text = first_line(error)
    if isinstance(error, UsageError):
        return f"cifar-lit: {error}", 2
    if isinstance(error, Failure):
        return f"cifar-lit: {error}", 1
    if isinstance(error, KeyboardInterrupt):
        return "\ncifar-lit: stopped", 130
    if not isinstance(error, Exception):
        return _interruption(error)
    kind = type(error).__name__
    if kind == "MisconfigurationException":
        return f"cifar-lit: {text}", 2
    if kind == "NotFiniteLoss":
        reached = "a checkpoint" if "weight" in text else "the weights"
        return (
            f"cifar-lit: {text}; stopped before it reached {reached}. Checkpoints of before are intact: "
            "lower --lr, or try --precision 32-true"
        ), 1
    if kind == "OutOfMemoryError" or "can't allocate memory" in text:
        return "cifar-lit: out of memory: lower --batch-size or data.eval_batch_size, or choose a smaller --net", 1
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"cifar-lit: the disk is full ({error.filename or 'while writing'}): free some space, then go on with --resume", 1
    if isinstance(error, PermissionError):
        return f"cifar-lit: no permission for {error.filename}: choose another folder with --logs or --data-dir", 1
    if text.startswith("Could not determine home directory"):  # pathlib's, of ~name where nobody is called so
        return "cifar-lit: a path begins with a home that is not on this machine: write the path out", 2
    if is_lost_peer(error):
        hint = "torchrun starts them all again" if starts_again(os.environ) else "Go on with --resume"
        return f"cifar-lit: another process of this run ended early; what it printed says why. {hint}.", 1
    if isinstance(error, ValueError):
        return f"cifar-lit: {text}", 2
    return f"cifar-lit: {kind}: {text} (--debug shows where)", 1


def _interruption(error: BaseException) -> tuple[str, int]:
    hint = getattr(error, "resume", None)
    return (f"cifar-lit: stopped. Go on with:\n  {hint}" if hint else "cifar-lit: stopped"), getattr(error, "exit_code", 1)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error is what the loss of another process of the run leads to."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST_PEER)
