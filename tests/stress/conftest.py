"""Sizes of the stress tests, and the process that forks their trainings.

Plain `pytest` runs each in a short form, `pytest -m stress` in the long one; a size can be set by a variable of the
environment, such as STRESS_KILLS=50. `--stress-json DIR` writes the counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def size(long_form: bool) -> Callable[[str, int, int], int]:
    """size(name, short, long): the one of the two that is asked for, or what STRESS_<NAME> says."""
    return lambda name, short, long: int(os.environ.get(f"STRESS_{name.upper()}", long if long_form else short))


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """For processes that import this package and these tests."""
    paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.fixture(scope="session")
def forking(environment: dict[str, str]) -> Iterator[Callable[..., Any]]:
    """forking(function, **arguments): what a function of these tests returns in a process that may be forked."""
    if not hasattr(os, "fork"):
        pytest.skip("these trainings are forked, which this system cannot do")
    command = [sys.executable, "-m", "stress.forked"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdin is not None and process.stdout is not None

        def call(function: Callable[..., Any], **arguments: Any) -> Any:
            process.stdin.write(json.dumps([f"stress.{function.__module__}", function.__name__, arguments]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            result, error = json.loads(line) if line else (None, f"it ended with {process.wait()}")
            assert error is None, error
            return result

        yield call
        process.stdin.close()
