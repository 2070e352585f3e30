"""Fixtures for all folders. This file's place also lets tests import `browser` and `stress.…`."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

# Set before torch is imported: workers with a thread per core slow each other down.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from browser import browser, open_page
from contract.command_line import RECIPE, SMALL, Training, run_command

from cifar_lit.base.signals import HANGUP
from cifar_lit.base.text import note_once

__all__ = ["browser", "open_page"]

TESTS = Path(__file__).parent


def _ignore(number: int, frame: object) -> None:
    """Do nothing: a handler for signals that this process ignores."""


def pytest_configure() -> None:
    """Start child processes with the default handlers for SIGINT and SIGHUP, also in a background job or under nohup.

    A process inherits SIG_IGN from its parent, but a function as handler is reset to the default.
    """
    for number in filter(None, (signal.SIGINT, HANGUP)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, _ignore)


@pytest.fixture(autouse=True)
def _forget_notes() -> None:
    """Let a test print notes that earlier tests of this process have printed."""
    note_once.cache_clear()


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Train the recipe small.yaml in one process on the CPU."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "small.yaml").write_text(RECIPE)
    with chdir(folder):
        answer = run_command(*SMALL)
    assert answer.code == 0, answer.err
    return Training(folder / "lightning_logs/small-1", answer)


@pytest.fixture(scope="session")
def run_dir(training: Training) -> Path:
    """Return the run folder of the shared training. Tests must not change it."""
    return training.run_dir


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty folder with the recipe small.yaml."""
    (tmp_path / "small.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Return the environment of processes that import this package and these tests."""
    paths = [str(TESTS.parent), str(TESTS), str(TESTS / "training"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.fixture(scope="session")
def forking(environment: dict[str, str]) -> Iterator[Callable[..., Any]]:
    """Return forking(function, **arguments), which calls a function of these tests in a process that may be forked."""
    if not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    command = [sys.executable, "-m", "stress.forked"]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment) as process:
        assert process.stdin and process.stdout

        def call(function: Callable[..., Any], **arguments: Any) -> Any:
            module = f"{Path(inspect.getfile(function)).parent.name}.{function.__module__}"
            process.stdin.write(json.dumps([module, function.__name__, arguments]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            result, error = json.loads(line) if line else (None, f"the process exited with {process.wait()}")
            assert error is None, error
            return result

        yield call
        process.stdin.close()
