"""A release has one version and date everywhere, its workflow calls what exists, and its files hold what they need."""

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
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}


def steps(workflow: str) -> list[dict[str, Any]]:
    return [step for job in WORKFLOWS[workflow]["jobs"].values() for step in job["steps"]]


def test_version_date_and_authors_are_the_same_everywhere() -> None:
    dated = re.search(r"^## (\d\S*) - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert dated
    assert {PROJECT["version"], cifar_lit.__version__, CITATION["version"], dated[1]} == {PROJECT["version"]}
    assert CITATION["date-released"] == dated[2]
    assert CITATION["authors"] == PROJECT["authors"] and CITATION["license"] == PROJECT["license"]
    (holder,) = re.findall(r"^ +Copyright \d+ (.+)$", (ROOT / "LICENSE").read_text(), re.MULTILINE)
    assert holder == PROJECT["authors"][0]["name"]
    assert {"cff-version", "message", "title", "type"} <= CITATION.keys()


def test_a_workflow_runs_scripts_that_exist_with_actions_of_one_version_each() -> None:
    actions: dict[str, set[str]] = {}
    for workflow in WORKFLOWS:
        for step in steps(workflow):
            action, _, version = step.get("uses", "").partition("@")
            actions.setdefault(action, set()).add(version)
            if script := re.match(r"\.ci/\w+", step.get("run", "")):
                assert (ROOT / script[0]).is_file()
    actions.pop("")
    assert actions and all(len(versions) == 1 for versions in actions.values()), actions


def test_a_release_attests_what_it_built_and_only_its_jobs_may_write() -> None:
    workflow = WORKFLOWS["release.yml"]
    assert workflow["permissions"] == {"contents": "read"}
    build, release, site = (workflow["jobs"][name] for name in ("build", "release", "site"))
    assert build["permissions"] == {"contents": "read", "id-token": "write", "attestations": "write"}
    assert release["needs"] == site["needs"] == "build"
    (attested,) = [step for step in build["steps"] if "attest-build-provenance" in step.get("uses", "")]
    assert attested["with"] == {"subject-path": "dist/*"}
    (check,) = [step["run"] for step in build["steps"] if step.get("run", "").startswith("grep")]
    assert check.startswith('grep -qx "version = \\"${GITHUB_REF_NAME#v}\\"" pyproject.toml')
    systems = WORKFLOWS["ci.yml"]["jobs"]["systems"]["strategy"]["matrix"]["os"]
    assert {system.partition("-")[0] for system in systems} == {"ubuntu", "windows", "macos"}


def test_the_container_copies_files_that_exist_and_installs_extras_that_exist() -> None:
    text = (ROOT / "examples/Containerfile").read_text()
    for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        assert [name for name in line.split() if not (ROOT / name).exists()] == []
    copied = {name for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for name in line.split()}
    assert {PROJECT["readme"], *PROJECT["license-files"], "cifar_lit"} <= copied
    (extras,) = re.findall(r'^ARG EXTRAS="(.+)"$', text, re.MULTILINE)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()


def test_templates_of_the_package_are_in_the_list_that_the_wheel_is_checked_for() -> None:
    script = Path(ROOT / ".ci/wheel").read_text()
    for template in (ROOT / "cifar_lit").rglob("*.j2"):
        assert f'"{template.relative_to(ROOT / "cifar_lit").as_posix()}"' in script
