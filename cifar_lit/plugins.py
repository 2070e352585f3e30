"""Nets, data sets and optimizers from one's own file, by their dotted name, such as `my_nets.MyNet`.

An import runs the module's code, and a name may stand in a config.yaml or a model file that came from anyone. So only names that
the user typed or trusted are imported: `allow_imports` is called for those, and all others are refused. The working folder, which
may have come from anyone too, is searched for their modules alone, after all other places, and is on no import path else.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import chdir, contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from cifar_lit.errors import Failure, UsageError, first_line, nearest


class UntrustedName(UsageError):
    """A name that would be imported, and that the user has neither typed nor trusted."""


_EVERY_NAME = "*"
_allowed: set[str] = set()


def allow_imports(paths: Iterable[str]) -> None:
    """Lets `import_callable` import these dotted names in this process."""
    _allowed.update(paths)


@contextmanager
def all_imports_allowed() -> Iterator[None]:
    """Within, `import_callable` imports whatever a file names."""
    _allowed.add(_EVERY_NAME)
    try:
        yield
    finally:
        _allowed.discard(_EVERY_NAME)


def guard_child_processes() -> None:
    """Keeps the working folder off the import path of processes that are started from here: `python -c` puts it first.

    So do multiprocessing, and the parser where it looks for a signature. A script's own folder, left out likewise, is put back.
    """
    if not os.environ.get("PYTHONSAFEPATH"):
        own = [] if sys.flags.safe_path else sys.path[:1]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*own, os.environ.get("PYTHONPATH")]))
        os.environ["PYTHONSAFEPATH"] = "1"


class _AwayLoader(SourceFileLoader):
    """Execute a package while the folder that it is installed in is the working folder."""

    def exec_module(self, module: ModuleType) -> None:
        with chdir(Path(self.path).parents[1]):
            super().exec_module(module)


class _AwayFinder:
    """Find the packages that read files of the working folder on import, and give them an `_AwayLoader`.

    torch loads libcusparseLt, whose run path has an empty entry: the system runs a `libcuda.so.1` of the working folder.
    matplotlib reads `matplotlibrc` there, which may be a named pipe, may be endless, and can start TeX.
    """

    packages = ("torch", "matplotlib")

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in self.packages else None
        if spec and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _AwayLoader(spec.loader.name, spec.loader.path)
        return spec


def guard_packages() -> None:
    """Keep torch and matplotlib from reading the working folder when they are imported."""
    sys.meta_path.insert(0, _AwayFinder())


def is_import_path(name: str) -> bool:
    """Whether a name of a net or a data set is a dotted one, such as `my_nets.MyNet`."""
    return "." in name and all(part.isidentifier() for part in name.split("."))


def import_module_of(path: str) -> ModuleType:
    """The module of a dotted name that the user gave; a file of the working folder takes no other module's place.

    Raises UsageError where there is none, Failure when it cannot be imported.
    """
    name, here = path.rpartition(".")[0], str(Path.cwd())
    sys.path.append(here)
    try:
        return import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise UsageError(f"{path}: there is no module {error.name!r} here or on PYTHONPATH") from None
        raise Failure(f"{name} cannot be imported: {type(error).__name__}: {first_line(error)}") from error
    finally:
        sys.path[:] = [place for place in sys.path if place is not here]  # the module may have added some of its own


MAX_SOURCE = 1 << 18  # bytes of a Python file that is read for its names


def check_no_file(name: str) -> None:
    """Raise UsageError if `name` is a Python file rather than the dotted name of something in it.

    Recognises `my_nets.py`, `folder/my_nets.py`, `my_nets.py:MyNet`, and `my_nets` if there is such a file. Nothing is imported.
    """
    place, _, member = name.partition(":")
    file = Path(place if place.endswith(".py") else f"{place}.py")
    if not place.endswith(".py") and (not place.isidentifier() or not file.is_file()):
        return
    path = file.resolve()
    below = path.is_relative_to(Path.cwd())
    module = ".".join(path.relative_to(Path.cwd()).with_suffix("").parts) if below else path.stem
    if not path.is_file():
        raise UsageError(f"there is no file {place}: name a class or function as {module}.{member or 'NAME'}")
    names = [member] if member else _public_names(path)
    others = f" It also has {', '.join(names[1:6])}." if names[1:] else ""
    remedy = f"name a class or function in it, as {module}.{names[0] if names else 'NAME'}"
    elsewhere = "" if below else f", and put {path.parent} on PYTHONPATH"
    raise UsageError(f"{name} is a file: {remedy}{elsewhere}.{others}")


def _public_names(file: Path) -> list[str]:
    """Return the classes, then the functions, that a Python file defines at its top level; none if it cannot be parsed."""
    try:
        with file.open("rb") as opened:
            nodes = ast.parse(opened.read(MAX_SOURCE)).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    kinds = (ast.ClassDef, ast.FunctionDef)
    return [node.name for kind in kinds for node in nodes if isinstance(node, kind) and not node.name.startswith("_")]


def import_callable(path: str) -> Callable[..., Any]:
    """Return what a dotted name stands for.

    Raises UntrustedName for a name that is not allowed, UsageError for a missing one or for the name of a file, Failure if its
    module cannot be imported.
    """
    check_no_file(path)
    if _allowed.isdisjoint((path, _EVERY_NAME)):
        raise UntrustedName(f"{path} would run code of its module: type it on the command line, or add --trust")
    module, name = import_module_of(path), path.rpartition(".")[2]
    if not hasattr(module, name):
        raise UsageError(f"{module.__name__} has no {name!r}.{nearest(name, vars(module))}")
    target: Callable[..., Any] = getattr(module, name)
    return target
