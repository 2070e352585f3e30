"""Architecture rules: folders import in one direction, and only the Trainer names devices."""

import ast
import re
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "cifar_lit"

# The imports allowed to each folder besides itself. Nothing imports `cli`; extras import everything below it.
ALLOWED: dict[str, set[str]] = {
    "base": set(),
    "data": {"base"},
    "models": {"base"},
    "training": {"base", "models", "data.progress", "data.batch"},
    "inference": {"base", "models", "data", "run", "runs"},
    "run": {"base", "models", "data", "training", "inference", "runs"},
    "runs": {"base", "models", "data", "training", "inference", "run"},
    "features": {"base", "training", "models", "data", "inference", "runs"},
}
NO_LIGHTNING = {"base", "models", "inference"}

SOURCES = sorted(PACKAGE.rglob("*.py"))


def folder_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(path: Path) -> Iterator[str]:
    """Yield the full name of everything that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: write the full name in `{ast.unparse(node)}`"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("folder", ALLOWED)
def test_a_folder_imports_only_the_folders_below_it(folder: str) -> None:
    allowed = tuple(f"cifar_lit.{module}." for module in (*ALLOWED[folder], folder))
    for path in (PACKAGE / folder).rglob("*.py"):
        for name in imported(path):
            assert not name.startswith("cifar_lit.") or f"{name}.".startswith(allowed), f"{path} imports {name}"


# These may import all features, to build them from settings.
BUILDS_FEATURES = ("cli/fit.py", "cli/flags.py", "cli/errors.py")


def test_the_core_imports_no_feature_and_a_feature_imports_no_other() -> None:
    for path in SOURCES:
        place = path.relative_to(PACKAGE)
        own = f"cifar_lit.features.{place.parts[1].removesuffix('.py')}" if place.parts[0] == "features" else "-"
        for name in imported(path):
            if not name.startswith("cifar_lit.features") or name.startswith(own):
                continue
            is_registry = name.startswith("cifar_lit.features.") and name.count(".") == 2 and name.split(".")[2] in (
                "FEATURES", "feature_class", "feature_settings"
            )  # fmt: skip
            assert is_registry and place.as_posix() in BUILDS_FEATURES, f"{path} imports {name}"


def test_there_are_no_import_cycles_not_even_for_type_checkers() -> None:
    names = {path: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in SOURCES}
    modules = {name.removesuffix(".__init__"): path for path, name in names.items()}
    graph = {}
    for name, path in modules.items():
        targets = {full if full in modules else full.rpartition(".")[0] for full in imported(path)}
        graph[name] = targets & modules.keys() - {name}
    list(TopologicalSorter(graph).static_order())  # raises CycleError


def test_nets_and_inference_do_not_import_lightning() -> None:
    for path in (path for path in SOURCES if folder_of(path) in NO_LIGHTNING):
        packages = {name.split(".")[0] for name in imported(path)}
        assert not packages & {"lightning", "pytorch_lightning", "torchmetrics"}, path


DEVICE = re.compile(r"(cuda|mps|xpu|hpu|tpu|gpu)(:\d+)?")


@pytest.mark.parametrize("path", [path for path in SOURCES if folder_of(path) in ("models", "training")], ids=str)
def test_models_and_training_name_no_device(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert not DEVICE.fullmatch(node.value), node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            call = ast.unparse(node)
            assert not re.match(r"torch\.(device|cuda|mps)\b", call), call
            assert node.func.attr != "cuda", call
            assert node.func.attr != "to" or "device" not in call, call


# Printing goes through `text.py`. These modules draw with rich's consoles.
PRINTING = {
    "base/text.py": {"print"},
    "cli/console.py": {"Console"},
    "data/progress.py": {"Console"},
}


def test_everything_is_printed_through_one_function() -> None:
    for path in SOURCES:
        allowed = PRINTING.get(str(path.relative_to(PACKAGE)), set())
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            assert name not in {"print", "Console"} - allowed, f"{path}: {ast.unparse(node)}"


def test_the_code_is_within_the_limits_of_its_size() -> None:
    root = PACKAGE.parent
    limits = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cifar-lit"]["size"]
    for folder, limit in limits.items():
        nodes = sum(count_nodes(path) for path in (root / folder).rglob("*.py"))
        assert nodes <= limit, f"{folder} has {nodes:,} nodes, the limit is {limit:,}: remove something first"


def count_nodes(path: Path) -> int:
    """Return the number of AST nodes of a file without docstrings, contexts and operators.

    Joining or splitting lines does not change it.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    uncounted = (ast.expr_context, ast.operator, ast.cmpop, ast.boolop, ast.unaryop)
    nodes = sum(not isinstance(node, uncounted) for node in ast.walk(tree))
    docstrings = sum(
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for node in ast.walk(tree)
    )
    return nodes - 2 * docstrings
