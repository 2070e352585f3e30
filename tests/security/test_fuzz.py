"""Readers of untrusted input, fuzzed: each input gives a value or one line of error in time, and has no side effect.

The short form fuzzes each reader for a second. Its seed is a checksum of the code, so a run can be repeated.
-m stress fuzzes for STRESS_FUZZ_SECONDS with a new seed. `corpus/` keeps failing inputs until they are fixed; then
add them to the reader's `found`.
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

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="measures memory in Linux's /proc")

READERS = {**fuzz_files.READERS, **fuzz_network.READERS, **fuzz_runs.READERS}
SECONDS = 1  # for each reader in the short form


@pytest.fixture(scope="module")
def genuine_files(genuine: Path) -> None:
    """Read the files of the genuine run."""
    files = [path for path in genuine.rglob("*") if path.is_file()]
    fuzz_runs.GENUINE |= {str(path.relative_to(genuine)): path.read_bytes() for path in files}


@cache
def checksum_of_code() -> int:
    """Return a 60-bit checksum of the package and the tests in this folder."""
    files = [*Path(cifar_lit.__file__).parent.rglob("*.py"), *Path(__file__).parent.glob("*.py")]
    contents = sorted(sha256(file.read_bytes()).digest() for file in files)
    return int.from_bytes(sha256(b"".join(contents)).digest()) >> 196


OUTCOMES: dict[str, Outcome] = {}


@pytest.mark.usefixtures("genuine_files")
@pytest.mark.parametrize("name", READERS)
def test_every_input_gives_a_value_or_one_line_without_side_effects(
    name: str, long_form: bool, write_counts: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    seconds = size("FUZZ_SECONDS", 30) if long_form else SECONDS
    first = secrets.randbits(60) if long_form else checksum_of_code()
    OUTCOMES[name] = outcome = fuzz(name, READERS[name], tmp_path / "fuzz", seconds, first)
    headline = {"inputs": sum(each.inputs for each in OUTCOMES.values()), "readers": len(OUTCOMES)}
    rows = {each: one._asdict() for each, one in OUTCOMES.items()}
    write_counts({"readers": rows, "seconds": seconds, "headline": headline, "unit": {"inputs": "tried"}})
    assert outcome.failure == "", outcome.failure
