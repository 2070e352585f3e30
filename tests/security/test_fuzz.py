"""Readers of what may come from anyone, given inputs that nobody wrote: a value or one line, soon, and nothing else happens.

Each time new ones, for some seconds a reader; with -m stress for STRESS_FUZZ_SECONDS. What a run finds lies in `corpus/` until it
is mended, and then becomes one of the `found` of its reader.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from security import fuzz_files, fuzz_lines, fuzz_runs
from security.fuzzing import Outcome, fuzz
from stress.forked import size

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory and what is done is watched as Linux shows it")

READERS = {**fuzz_files.READERS, **fuzz_lines.READERS, **fuzz_runs.READERS}
SECONDS = 2  # for each reader, in any run


@pytest.fixture(scope="module")
def genuine_files(genuine: Path) -> None:
    """Reads the files of the run that are changed."""
    fuzz_runs.GENUINE |= {str(path.relative_to(genuine)): path.read_bytes() for path in genuine.rglob("*") if path.is_file()}


OUTCOMES: dict[str, Outcome] = {}


@pytest.mark.usefixtures("genuine_files")
@pytest.mark.parametrize("name", READERS)
def test_whatever_is_read_ends_with_a_value_or_one_line_and_nothing_else_happens(
    name: str, long_form: bool, write_counts: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    seconds = size("FUZZ_SECONDS", 30) if long_form else SECONDS
    OUTCOMES[name] = outcome = fuzz(name, READERS[name], tmp_path / "fuzz", seconds)
    headline = {"inputs": sum(each.inputs for each in OUTCOMES.values()), "readers": len(OUTCOMES)}
    rows = {each: one._asdict() for each, one in OUTCOMES.items()}
    write_counts({"readers": rows, "seconds": seconds, "headline": headline, "unit": {"inputs": "tried"}})
    assert outcome.failure == "", outcome.failure
