"""Nets, data sets, optimizers and schedules of the user's own files, by their dotted name, such as `my_nets.MyNet`.

`trust` says which names may come from a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from inspect import isclass, isroutine, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cifar_lit.base.errors import UsageError, nearest

if TYPE_CHECKING:
    NameOrObject = Any
else:
    NameOrObject = str  # A parser would import a class that a file names, so the command line accepts names only.


def find_part(part: object) -> Any:
    """Return a class, a function or an object, which may be given by its import path; see `import_callable`."""
    if isinstance(part, str):
        return import_callable(part)
    return part


def part_name(part: object) -> str:
    """Return the name of a net, optimizer, schedule or data set that is given by name, as a class or as an object."""
    if isinstance(part, str):
        return part
    if isinstance(part, partial):
        part = part.func
    name = getattr(part, "__qualname__", None)
    if name is None:
        part, name = type(part), type(part).__qualname__
    return f"{part.__module__}.{name}"


def accepted_arguments(build: Callable[..., object], settings: Mapping[str, object]) -> dict[str, Any]:
    """Return the settings that the signature of a class or function accepts, and that a partial does not set itself."""
    parameters = signature(build).parameters
    accepted = set(parameters)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        accepted.update(settings)
    if isinstance(build, partial):
        accepted.difference_update(build.keywords)
    return {name: value for name, value in settings.items() if name in accepted}


def build_part(part: object, kind: type, *arguments: object, **settings: object) -> Any:
    """Return an object of `kind`: `part` itself, or the result of a class or function that may be given by its name.

    Only those `settings` are passed that the signature accepts. Raises UsageError for another kind of object.
    """
    target = find_part(part)
    if isinstance(target, kind):
        return target
    wanted = f"a {kind.__module__}.{kind.__name__}"
    if not (isroutine(target) or isclass(target) or isinstance(target, partial)):
        raise UsageError(f"{part_name(part)} must be {wanted}, or a class or function that returns one, not an object")
    built = target(*arguments, **accepted_arguments(target, settings))
    if not isinstance(built, kind):
        raise UsageError(f"{part_name(part)} must return {wanted}, not a {type(built).__name__}")
    return built


def is_import_path(name: str) -> bool:
    """Return whether a name of a net or data set is dotted, such as `my_nets.MyNet`."""
    return "." in name and all(part.isidentifier() for part in name.split("."))


def check_no_file(name: str) -> None:
    """Raise UsageError for a Python file, such as `my_nets.py`, instead of a dotted name."""
    file = name.partition(":")[0]
    if file.endswith(".py"):
        raise UsageError(f"{name} is a file: name a class or function in it, as {Path(file).stem}.NAME")


def import_callable(path: str) -> Callable[..., object]:
    """Import the class or function with a dotted name.

    Raises:
        UsageError: if the name, its module or one that this imports is missing, or it is the name of a file.
    """
    check_no_file(path)
    module_name, _, name = path.rpartition(".")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        raise UsageError(f"{path}: there is no module {error.name!r} here or on PYTHONPATH") from error
    if not hasattr(module, name):
        names = [each for each in vars(module) if not each.startswith("_")]
        raise UsageError(f"{module_name} has no {name!r}.{nearest(name, names)}")
    target: Callable[..., object] = getattr(module, name)
    return target
