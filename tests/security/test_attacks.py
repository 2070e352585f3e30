"""Attacks through untrusted input: nothing is executed, deleted, overwritten or hidden, and the user is informed.

-m stress runs all of them, other runs a sample. Each module in `AREAS` covers one kind of input; `docs/security.md`
says what that input may decide.
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

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="measures memory and programs in Linux's /proc")

AREAS = sorted(path.stem for path in Path(__file__).parent.glob("attacks_*.py"))
EVERY = 12  # the short form runs every twelfth attack


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
    assert {name: lines for name, lines in harm.items() if lines} == {}
