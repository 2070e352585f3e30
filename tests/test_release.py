"""A release has one version and date everywhere, and its files hold what they need."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml
from contract.command_line import ROOT

import cifar_lit

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CITATION: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_version_date_and_authors_are_the_same_everywhere() -> None:
    dated = re.search(r"^## (\d\S*) - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert dated
    assert {PROJECT["version"], cifar_lit.__version__, CITATION["version"], dated[1]} == {PROJECT["version"]}
    assert CITATION["date-released"] == dated[2]
    assert CITATION["authors"] == PROJECT["authors"] and CITATION["license"] == PROJECT["license"]
    (holder,) = re.findall(r"^ +Copyright \d+ (.+)$", (ROOT / "LICENSE").read_text(), re.MULTILINE)
    assert holder == PROJECT["authors"][0]["name"]
    assert {"cff-version", "message", "title", "type"} <= CITATION.keys()


def test_templates_of_the_package_are_in_the_list_that_the_wheel_is_checked_for() -> None:
    script = Path(ROOT / ".ci/wheel").read_text()
    for template in (ROOT / "cifar_lit").rglob("*.j2"):
        assert f'"{template.relative_to(ROOT / "cifar_lit").as_posix()}"' in script
