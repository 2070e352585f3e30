"""Readers of what may come from anyone, given inputs that nobody wrote: a value or one line, soon, and nothing else happens.

For some seconds a reader, new ones after each change of the code: they are drawn from a checksum of it, so that a run can be
repeated. With -m stress for STRESS_FUZZ_SECONDS, and new ones each time. What a run finds lies in `corpus/` until it is mended,
and then becomes one of the `found` of its reader.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from security import fuzz_files, fuzz_network, fuzz_runs
from security.fuzzing import Outcome, fuzz
from stress.forked import size

import cifar_lit

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory and what is done is watched as Linux shows it")

READERS = {**fuzz_files.READERS, **fuzz_network.READERS, **fuzz_runs.READERS}
SECONDS = 2  # for each reader, in any run


@pytest.fixture(scope="module")
def genuine_files(genuine: Path) -> None:
    """Reads the files of the run that are changed."""
    fuzz_runs.GENUINE |= {
        str(path.relative_to(genuine)): path.read_bytes() for path in genuine.rglob("*") if path.is_file()
    }


@cache
def checksum_of_code() -> int:
    """A number of 60 bits that changes with the package and the tests of this folder."""
    files = [*Path(cifar_lit.__file__).parent.rglob("*.py"), *Path(__file__).parent.glob("*.py")]
    contents = sorted(sha256(file.read_bytes()).digest() for file in files)
    return int.from_bytes(sha256(b"".join(contents)).digest()) >> 196


OUTCOMES: dict[str, Outcome] = {}


@pytest.mark.usefixtures("genuine_files")
@pytest.mark.parametrize("name", READERS)
def test_whatever_is_read_ends_with_a_value_or_one_line_and_nothing_else_happens(
    name: str, long_form: bool, write_counts: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    seconds = size("FUZZ_SECONDS", 30) if long_form else SECONDS
    first = secrets.randbits(60) if long_form else checksum_of_code()
    OUTCOMES[name] = outcome = fuzz(name, READERS[name], tmp_path / "fuzz", seconds, first)
    headline = {"inputs": sum(each.inputs for each in OUTCOMES.values()), "readers": len(OUTCOMES)}
    rows = {each: one._asdict() for each, one in OUTCOMES.items()}
    write_counts({"readers": rows, "seconds": seconds, "headline": headline, "unit": {"inputs": "tried"}})
    assert outcome.failure == "", outcome.failure
