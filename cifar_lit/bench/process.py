"""A training in a process of its own, as a user starts it, with the moments at which it printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cifar_lit
from cifar_lit.errors import Failure, UsageError

PLACES = ("--data-dir", "--data.root", "--data.cache_dir")  # flags that say where files lie, not what was measured


class Finished(NamedTuple):
    """A training that ended well. lines: what it printed, each with the seconds since the start of its process."""

    metrics: dict[str, Any]
    seconds: float
    lines: list[tuple[float, str]]


def train(argv: Sequence[str]) -> Finished:
    """Runs `cifar-lit train` with these flags in a process and a folder of its own.

    Raises UsageError or Failure, as the process ended, with the last line that it printed.
    """
    with tempfile.TemporaryDirectory() as logs, tempfile.TemporaryFile("w+") as errors:
        started = time.perf_counter()
        command = [sys.executable, "-m", "cifar_lit", "train", *argv, "--logs", logs]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment()) as process:
            assert process.stdout is not None
            lines = [(time.perf_counter() - started, text.rstrip()) for text in process.stdout]
        seconds = time.perf_counter() - started
        if process.returncode:
            errors.seek(0)
            raise as_error(process.returncode, errors.read(), "the training")
        (metrics,) = Path(logs).glob("*/metrics.json")
        return Finished(json.loads(metrics.read_text()), seconds, lines)


def as_error(code: int, stderr: str, what: str) -> Failure | UsageError:
    """The error of a command of ours that ended with an exit code, with the last line that it printed."""
    line = (stderr.strip().splitlines() or [f"{what} ended with exit code {code}"])[-1]
    return (UsageError if code == 2 else Failure)(line.removeprefix("cifar-lit: "))


def environment() -> dict[str, str]:
    """For a process that can import this package, also from a checkout that is not installed, and prints at once."""
    root = str(Path(cifar_lit.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def without_places(argv: Sequence[str]) -> list[str]:
    """The flags without those that only say where files lie."""
    kept: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word.partition("=")[0] not in PLACES:
            kept.append(word)
        elif "=" not in word and rest:
            rest.pop(0)
    return kept
