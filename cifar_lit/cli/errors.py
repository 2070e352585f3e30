"""Explain errors in one line with an exit code."""

from __future__ import annotations

import os
import re

from cifar_lit.base.errors import Failure, UsageError, first_line
from cifar_lit.base.files import DISK_FULL, find_os_error
from cifar_lit.base.text import printable
from cifar_lit.cli.launch import is_child

# Messages of torch's allocators, CUDA, cuBLAS and cuDNN. cuDNN finds no engine if none can allocate its workspace.
NO_MEMORY = re.compile("allocate memory|out of memory|ALLOC(ATION)?_FAILED|unable to find an engine")
LOST_PEER = re.compile("Connection (closed|reset) by peer|NCCL|Broken pipe|recvValue failed")
TIMEOUT = re.compile("^(?!CUDA|DataLoader).*([Tt]imed out|[Tt]imeout)", re.DOTALL)


def explain_error(error: BaseException) -> tuple[str, int]:
    """Return the text to print (may be empty) and the exit code for an exception that ended a command."""
    line, code = _explain(error)
    if isinstance(error, Exception):  # the text of an interruption is our own and has two lines
        line = printable(line)
    if is_lost_peer(error) or is_timeout(error):
        line += resume_hint(error)
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    if rank == "0":
        return line, code
    if is_lost_peer(error) or code >= 128:  # the first process says it
        return "", code
    if isinstance(error, UsageError) and is_child():  # the process that started this one says it
        return "", code
    return f"[rank {rank}] {line}", code


def _explain(error: BaseException) -> tuple[str, int]:
    text = first_line(error)
    kind = type(error).__name__
    if isinstance(error, (UsageError, Failure)):
        return f"cifar-lit: {error}", error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "\ncifar-lit: stopped", 130
    if not isinstance(error, Exception):  # such as Interrupted
        return f"cifar-lit: stopped{resume_hint(error)}", getattr(error, "exit_code", 1)
    if kind == "NotFiniteLoss":
        remedy = "start again with a lower --lr, or resume with --precision 32-true"
        text += f"; the training was stopped, and its checkpoints are intact: {remedy}"
    elif isinstance(error, RuntimeError) and NO_MEMORY.search(str(error)):
        text = "out of memory: halve --batch-size or --data.eval_batch_size, or choose a smaller --net"
    elif (full := find_os_error(error)) and full.errno in DISK_FULL:
        text = f"the disk is full ({full.filename or 'while writing'}): free some space, then try again"
        text += resume_hint(error)
    elif text.startswith("operator torchvision::"):  # torchvision's compiled operators do not load
        text = "torch and torchvision are of different builds: uninstall both, then install both from one source"
    elif isinstance(error, PermissionError):
        text = f"no permission for {error.filename}: choose another folder with --logs or --data-dir"
    elif is_lost_peer(error):
        text = "another process of this run ended early: see its message for the reason"
    elif is_timeout(error):
        text = "another process of this run gave no answer within --rank-timeout"
    elif kind == "MisconfigurationException" or isinstance(error, ValueError):
        return f"cifar-lit: {text}", 2
    else:
        text = f"{kind}: {text} (--debug shows where)"
    return f"cifar-lit: {text}", 1


def resume_hint(error: BaseException) -> str:
    """Return the command that resumes the run as the end of a message, empty without a checkpoint."""
    command = getattr(error, "resume", None)
    if command:
        return f". Resume with:\n  {command}"
    return ""


def is_timeout(error: BaseException) -> bool:
    """Return whether another process of the run did not take part in a collective call."""
    return _is_of_torch(error) and TIMEOUT.search(str(error)) is not None


def is_lost_peer(error: BaseException) -> bool:
    """Return whether the error follows from the loss of another process of the run."""
    return _is_of_torch(error) and LOST_PEER.search(str(error)) is not None


def _is_of_torch(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and not isinstance(error, Failure)
