"""Nets, data sets and optimizers from one's own file, by their dotted name, such as `my_nets.MyNet`.

An import runs the module's code, and a name may stand in a config.yaml or a model file that came from anyone. So only names that
the user typed or trusted are imported: `allow_imports` is called for those, and all others are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from cifar_lit.errors import Failure, UsageError, first_line, nearest

_allowed: set[str] = set()


def allow_imports(paths: Iterable[str]) -> None:
    """Lets `import_callable` import these dotted names in this process."""
    _allowed.update(paths)


@contextmanager
def own_modules() -> Iterator[None]:
    """Modules of the working directory can be imported meanwhile: after all others, so that no file there takes one's place."""
    sys.path.append(str(Path.cwd()))
    try:
        yield
    finally:
        sys.path.pop()


def is_import_path(name: str) -> bool:
    """Whether a name of a net or a data set is a dotted one, such as `my_nets.MyNet`."""
    return "." in name and all(part.isidentifier() for part in name.split("."))


def import_callable(path: str) -> Callable[..., Any]:
    """What a dotted name stands for; its module is also looked for in the working directory.

    Raises UsageError for a name that is not allowed or not there, Failure when its module cannot be imported.
    """
    if path not in _allowed:
        raise UsageError(f"{path} would run code of its module: type it on the command line, or add --trust")
    module_name, _, name = path.rpartition(".")
    try:
        with own_modules():
            module = import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(f"{path}: there is no module {error.name!r} here or on PYTHONPATH") from None
        raise Failure(f"{module_name} cannot be imported: {type(error).__name__}: {first_line(error)}") from error
    if not hasattr(module, name):
        raise UsageError(f"{module_name} has no {name!r}.{nearest(name, vars(module))}")
    target: Callable[..., Any] = getattr(module, name)
    return target
