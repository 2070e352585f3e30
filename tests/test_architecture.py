"""Nothing depends on an optional part: the core imports none, and trains without the folder of any of them."""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from contract.command_line import run_process
from test_house import PACKAGE, SOURCES, imported

from cifar_lit.cli.main import OWN
from cifar_lit.features import FEATURES

EXTRAS = [path.parent for path in sorted((PACKAGE / "extras").glob("*/__init__.py"))]
NAMED_IN = {"extras": {PACKAGE / "cli/main.py"}}  # the tables that name optional parts by a string

# Trains, then asks for the commands of the deleted part. Prints the exit codes.
PROGRAM = """
import json, sys
import cifar_lit
from cifar_lit.cli import main
lines = ["train --recipe quickstart --accelerator cpu --data.count 300 --data.val_size 60 --epochs 1", *sys.argv[1:]]
codes = [main(line.split()) for line in lines]
print(json.dumps([cifar_lit.__file__, codes]))
"""


def names(path: Path) -> set[str]:
    """Return the modules that a file imports, and those that one of its texts names."""
    texts = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
    named = {match for text in texts for match in re.findall(r"\bcifar_lit\.[\w.]+", str(text))}
    return {*imported(path), *named}


@pytest.mark.parametrize("folder", NAMED_IN)
def test_no_module_of_the_core_imports_an_optional_part(folder: str) -> None:
    root = PACKAGE / folder
    for path in (path for path in SOURCES if root not in path.parents):
        found = set(imported(path)) if path in NAMED_IN[folder] else names(path)
        assert [name for name in found if f"{name}.".startswith(f"cifar_lit.{folder}.")] == [], path


def test_no_extra_imports_another_extra() -> None:
    for extra in EXTRAS:
        others = tuple(f"cifar_lit.extras.{other.name}." for other in EXTRAS if other != extra)
        for path in extra.rglob("*.py"):
            assert [name for name in names(path) if f"{name}.".startswith(others)] == [], path


def package_without(part: Path, folder: Path) -> Path:
    """Return a copy of the package in `folder` without a file or folder."""
    copy = folder / "cifar_lit"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    deleted = copy / part.relative_to(PACKAGE)
    if deleted.is_dir():
        shutil.rmtree(deleted)
    else:
        deleted.unlink()
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("part", EXTRAS, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_training_succeeds_without_an_optional_part_and_its_commands_say_so(part: Path, tmp_path: Path) -> None:
    copy = package_without(part, tmp_path)
    module = ".".join(part.relative_to(PACKAGE.parent).with_suffix("").parts)
    commands = [name for name, target in OWN.items() if target.startswith((f"{module}.", f"{module}:"))]
    answer = run_process([sys.executable, "-c", PROGRAM, *commands], tmp_path, PYTHONPATH=str(tmp_path))
    file, codes = json.loads(answer.lines[-1])
    assert Path(file).parent == copy
    assert codes == [0, *[2] * len(commands)], answer.err
    assert [line for line in answer.error_lines if line.startswith("cifar-lit: ")] == [
        f"cifar-lit: the command {name!r} is missing in this installation, with {OWN[name].partition(':')[0]}: "
        "install cifar-lit again"
        for name in commands
    ]


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_a_training_succeeds_without_a_feature_whose_flag_is_then_unknown(feature: str, tmp_path: Path) -> None:
    folder = PACKAGE / "features" / feature
    package_without(folder if folder.is_dir() else folder.with_suffix(".py"), tmp_path)
    line = f"fit --recipe quickstart --{feature} true"
    answer = run_process([sys.executable, "-c", PROGRAM, line], tmp_path, PYTHONPATH=str(tmp_path))
    assert json.loads(answer.lines[-1])[1] == [0, 2], answer.err
    assert f"there is no flag --{feature}." in answer.err
