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

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory and programs are watched as Linux shows them")

AREAS = sorted(path.stem for path in Path(__file__).parent.glob("attacks_*.py"))
EVERY = 4  # one of so many in the short form


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
