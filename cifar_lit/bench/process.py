"""A training in a process of its own, as a user starts it, with the moments at which it printed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import cifar_lit
from cifar_lit.errors import Failure, UsageError

PLACES = ("--data-dir", "--data.root", "--data.cache_dir")  # flags that say where files lie, not what was measured


class FinishedTraining(NamedTuple):
    """lines: what it printed, each with the seconds since the start of its process."""

    metrics: dict[str, Any]
    seconds: float
    lines: list[tuple[float, str]]


@contextmanager
def started(command: Sequence[str], **settings: Any) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own, which Ctrl-C does not reach: it is killed, with all it started, when the block fails."""
    settings = {"text": True, "env": child_environment(), "stdin": subprocess.DEVNULL, "process_group": 0, **settings}
    with subprocess.Popen(command, **settings) as process:
        try:
            yield process
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise


def train(argv: Sequence[str], on_line: Callable[[str], None] = lambda line: None) -> FinishedTraining:
    """Runs `cifar-lit train` in a process and a folder of its own; raises its UsageError or Failure, with its last line.

    on_line: is told each line as it is printed.
    """
    if any(word.partition("=")[0] == "--logs" for word in argv):
        raise UsageError("the runs are only measured, in a folder that is gone afterwards: leave --logs out")
    with tempfile.TemporaryDirectory() as logs, tempfile.TemporaryFile("w+") as errors:
        before = time.perf_counter()
        lines = []
        command = [sys.executable, "-m", "cifar_lit", "train", *argv, "--logs", logs]
        with started(command, stdout=subprocess.PIPE, stderr=errors) as process:
            assert process.stdout is not None
            for text in process.stdout:
                lines.append((time.perf_counter() - before, text.rstrip()))
                on_line(text)
        seconds = time.perf_counter() - before
        if process.returncode:
            errors.seek(0)
            raise as_error(process.returncode, errors.read(), "the training")
        metrics = [*Path(logs).glob("*/metrics.json")]
        if len(metrics) != 1:
            raise Failure(
                f"the training left {len(metrics)} results in place of one: take out --folds, and flags that cut it short"
            )
        return FinishedTraining(json.loads(metrics[0].read_text()), seconds, lines)


def as_error(code: int, stderr: str, what: str) -> Failure | UsageError:
    """The error of a command of ours that ended with an exit code, with the last line that it printed."""
    line = (stderr.strip().splitlines() or [f"{what} ended with exit code {code}"])[-1]
    return (UsageError if code == 2 else Failure)(line.removeprefix("cifar-lit: "))


def child_environment() -> dict[str, str]:
    """For a process that can import this package, also from a checkout that is not installed, and prints at once."""
    root = str(Path(cifar_lit.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def without_places(argv: Sequence[str]) -> list[str]:
    """The flags without those that only say where files lie."""
    values = {place + 1 for place, word in enumerate(argv) if word in PLACES}
    return [word for place, word in enumerate(argv) if place not in values and word.partition("=")[0] not in PLACES]
