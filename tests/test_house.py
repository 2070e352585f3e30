"""Rules of the house: rooms import in one direction, only the Trainer names devices, and the size is limited."""

import ast
import re
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from cifar_lit.features import FEATURES

PACKAGE = Path(__file__).parent.parent / "cifar_lit"

# Rooms from the ground up. A module imports its own room and rooms on lower lines. Rooms of one line do not import each
# other. Imports for type checkers and within functions count as well.
FLOORS = (
    {"__version__", "base"},
    {"models", "data"},
    {"training"},
    {"inference"},
    {"features", "run"},
    {"runs"},
    {"train"},
    {"extras"},
    {"cli"},
    {"__init__", "__main__"},
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# Optional parts are imported by nobody, and `train` and the registry of the features by the command line alone.
IMPORTED_BY = {"features": {"cli"}, "train": {"cli"}, "extras": set(), "cli": {"__main__"}}
NO_LIGHTNING = {"base", "models", "inference"}

SOURCES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(path: Path) -> Iterator[str]:
    """Yield the full name of everything that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: write the full name in `{ast.unparse(node)}`"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_rooms_import_only_the_rooms_below_them() -> None:
    for path in SOURCES:
        room = room_of(path)
        for name in imported(path):
            package, target, *_ = f"{name}.__version__".split(".")
            if package != "cifar_lit" or target == room:
                continue
            assert FLOOR_OF[target] < FLOOR_OF[room], f"{path} imports {name}"
            assert room in IMPORTED_BY.get(target, {room}), f"{path} imports {name}"


def test_optional_parts_import_no_other_optional_part() -> None:
    for room, parts in (("features", FEATURES), ("extras", ("hub", "label", "serve"))):
        modules = {part: f"cifar_lit.{room}.{part}." for part in parts}
        for path in (PACKAGE / room).rglob("*.py"):
            own = path.relative_to(PACKAGE / room).with_suffix("").parts[0]
            others = tuple(module for part, module in modules.items() if part != own)
            for name in imported(path):
                assert not f"{name}.".startswith(others), f"{path} imports {name}"


def test_data_imports_the_decoder_of_photos_only_for_own_images() -> None:
    for path in (path for path in SOURCES if path.parent == PACKAGE / "data" and path.stem != "sources"):
        assert not [name for name in imported(path) if name.startswith("cifar_lit.data.photos")], path


def test_there_are_no_import_cycles() -> None:
    names = {path: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in SOURCES}
    modules = {name.removesuffix(".__init__"): path for path, name in names.items()}
    graph = {}
    for name, path in modules.items():
        targets = {full if full in modules else full.rpartition(".")[0] for full in imported(path)}
        graph[name] = targets & modules.keys() - {name}
    list(TopologicalSorter(graph).static_order())  # raises CycleError


def test_nets_and_inference_do_not_import_lightning() -> None:
    for path in (path for path in SOURCES if room_of(path) in NO_LIGHTNING):
        packages = {name.split(".")[0] for name in imported(path)}
        assert not packages & {"lightning", "pytorch_lightning", "torchmetrics"}, path


DEVICE = re.compile(r"(cuda|mps|xpu|hpu|tpu|gpu)(:\d+)?")


@pytest.mark.parametrize("path", [path for path in SOURCES if room_of(path) in ("models", "training")], ids=str)
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
    "base/text.py": {"print", "Console"},
    "cli/console.py": {"Console"},
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
