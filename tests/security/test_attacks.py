"""Attacks through whatever comes from outside: nothing is executed, deleted, overwritten or hidden, and the user is told.

All of them with -m stress; some in any other run. Each of the modules in `AREAS` has the attacks on one thing, `docs/security.md`
what that thing may decide.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from security.attack import Attack
from security.sandbox import read_apart
from security.test_hostile import SMALL
from stress.forked import warm

from cifar_lit.cli import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory and programs are watched as Linux shows them")

AREAS = sorted(path.stem for path in Path(__file__).parent.glob("attacks_*.py"))
EVERY = 4  # one of so many in the short form


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a training with its test, by small.yaml two folders above."""
    warm()  # here and not in each process, so that imports are not counted
    folder = tmp_path_factory.mktemp("genuine")
    (folder / "small.yaml").write_text(SMALL)
    answer = read_apart(folder, lambda: main(["train", "--recipe", "small.yaml", "--logs", "runs"]))
    assert answer.code == 0, answer.lines
    return folder / "runs" / "small-1"


def test_no_attack_does_any_harm(
    genuine: Path, long_form: bool, write_counts: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    harm: dict[str, list[str]] = {}
    headline = {}
    for area in AREAS:
        attacks: dict[str, Attack] = import_module(f"security.{area}").ATTACKS
        for name, attack in list(attacks.items())[:: 1 if long_form else EVERY]:
            folder = tmp_path / str(len(harm))
            _, harm[f"{area.removeprefix('attacks_')}: {name}"] = attack.carry_out(genuine, folder)
            shutil.rmtree(folder)
        headline[area.replace("_", ": ")] = len(harm) - sum(headline.values())
    write_counts({"harm": harm, "headline": headline, "unit": dict.fromkeys(headline, "tried")})
    done = [f"{name}: {'; '.join(lines)}" for name, lines in harm.items() if lines]
    assert not done, "\n".join(done)
