"""The house's rules that a reader relies on: data flows one way between the folders, and devices are the Trainer's business."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "cifar_lit"

# What a folder may import besides itself and the modules at the top level; `data.decode` turns a file into pixels, and
# `data.progress` shows how far a long preparation is.
ALLOWED: dict[str, set[str]] = {
    "data": set(),
    "models": set(),
    "distributed": {"runs"},
    "training": {"models", "data.progress"},
    "runs": {"models", "data", "training"},
    "inference": {"runs", "models", "data.decode", "data.image_set"},
}
TOP_LEVEL = {"errors", "files", "hardware", "plugins", "signals", "stats", "text"}
NO_LIGHTNING = {"errors", "files", "hardware", "plugins", "signals", "stats", "text", "models", "inference"}

SOURCES = sorted(PACKAGE.rglob("*.py"))


def folder_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports anywhere in it, with the names taken from them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: write the full name in `{ast.unparse(node)}`"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("folder", ALLOWED)
def test_a_folder_imports_only_what_stands_before_it(folder: str) -> None:
    allowed = ALLOWED[folder] | TOP_LEVEL | {folder}
    for path in (PACKAGE / folder).rglob("*.py"):
        for name in imported(path):
            inner = name.removeprefix("cifar_lit.")
            if inner != name:
                assert any(inner == other or inner.startswith(f"{other}.") for other in allowed), (
                    f"{path} imports {name}"
                )


def test_no_module_imports_itself_through_others_not_even_for_type_checkers() -> None:
    modules = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in SOURCES
    }
    graph = {
        name: {full if full in modules else full.rpartition(".")[0] for full in imported(path)}
        & modules.keys() - {name}
        for name, path in modules.items()
    }
    list(TopologicalSorter(graph).static_order())  # raises CycleError


def test_nets_and_their_use_do_without_lightning() -> None:
    for path in (path for path in SOURCES if folder_of(path) in NO_LIGHTNING):
        packages = {name.split(".")[0] for name in imported(path)}
        assert not packages & {"lightning", "pytorch_lightning", "torchmetrics"}, path


DEVICE = re.compile(r"(cuda|mps|xpu|hpu|tpu|gpu)(:\d+)?")


@pytest.mark.parametrize("path", [path for path in SOURCES if folder_of(path) in ("models", "training")], ids=str)
def test_no_device_is_named_where_nets_and_training_are_written(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert not DEVICE.fullmatch(node.value), node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            call = ast.unparse(node)
            assert not re.match(r"torch\.(device|cuda|mps)\b", call), call
            assert node.func.attr != "cuda", call
            assert node.func.attr != "to" or "device" not in call, call


# Printing goes through `text.py`; rich's consoles are allowed where they draw.
PRINTING = {
    "text.py": {"print"},
    "cli/console.py": {"Console"},
    "cli/classify.py": {"Console"},
    "data/progress.py": {"Console"},
}


def test_what_is_printed_goes_through_one_function() -> None:
    for path in SOURCES:
        allowed = PRINTING.get(str(path.relative_to(PACKAGE)), set())
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            assert name not in {"print", "Console"} - allowed, f"{path}: {ast.unparse(node)}"
