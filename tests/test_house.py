"""The house's rules that a reader relies on: which room knows which, where the device appears, how long a file is."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "cifar_lit"

# What a room may import besides itself and `errors`; `data.decode` stands for what turns a file into pixels.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "memory": set(),
    "disk": set(),
    "ranks": set(),
    "data": set(),
    "models": set(),
    "training": {"models"},
    "results": {"models"},
    "use": {"results", "models", "data.decode"},
}
EVERYTHING = {"bench", "cli", "drills", "__main__", "__init__"}
NO_LIGHTNING = {"errors", "memory", "disk", "models", "use"}

SOURCES = sorted(path for path in PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imported(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports anywhere in it, with the names taken from them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_room_has_its_line_in_the_table() -> None:
    rooms = {room_of(path) for path in SOURCES}
    assert rooms <= ALLOWED.keys() | EVERYTHING
    assert {"data", "models", "training", "results", "cli"} <= rooms


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_what_its_room_may_know(path: Path) -> None:
    room = room_of(path)
    if room in EVERYTHING:
        return
    allowed = ALLOWED[room] | {room, "errors", "memory", "disk"}
    for name in imported(path):
        if name.split(".")[0] != "cifar_lit":
            continue
        inner = name.removeprefix("cifar_lit.")
        assert any(inner == other or inner.startswith(f"{other}.") for other in allowed), f"{room} may not import {name}"


@pytest.mark.parametrize("path", [path for path in SOURCES if room_of(path) in NO_LIGHTNING], ids=lambda path: path.name)
def test_nets_and_their_use_do_without_lightning(path: Path) -> None:
    assert not [name for name in imported(path) if name.split(".")[0] in ("lightning", "pytorch_lightning", "torchmetrics")]


DEVICES = re.compile(r"(cuda|mps|xpu|hpu|tpu|gpu)(:\d+)?")


def strings(tree: ast.AST) -> Iterator[str]:
    """The texts in a file that are values, not docstrings."""
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            assert isinstance(node.body[0], ast.Expr)
            docstrings.add(id(node.body[0].value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if room_of(path) in ("models", "training")], ids=lambda path: f"{room_of(path)}/{path.name}"
)
def test_no_device_is_named_where_nets_and_training_are_written(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not [text for text in strings(tree) if DEVICES.fullmatch(text)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            call = ast.unparse(node)
            assert node.func.attr != "cuda", call
            assert not call.startswith(("torch.device(", "torch.cuda.", "torch.mps.")), call
            if node.func.attr == "to":
                assert "device" not in call and not [text for text in strings(node) if DEVICES.match(text)], call


@pytest.mark.parametrize("folder", ["cifar_lit", "scripts", "tests"])
def test_no_file_is_longer_than_a_few_screens(folder: str) -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py")}
    assert lengths
    assert not {str(path.relative_to(ROOT)): length for path, length in lengths.items() if length > 300}


def test_no_file_is_a_drawer_for_everything() -> None:
    drawers = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert not [path for path in (*SOURCES, *(ROOT / "tests").rglob("*.py")) if path.stem in drawers]


def test_every_test_file_has_a_name_of_its_own() -> None:
    """pytest imports tests by their bare names, so that two of the same name would hide each other."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name not in ("conftest.py", "__init__.py")]
    assert sorted(names) == sorted(set(names))
