"""Nets, data sets, optimizers and schedules of the user's own files, by their dotted name, such as `my_nets.MyNet`.

`trust` says which names may come from a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cifar_lit.errors import Failure, UsageError, first_line, nearest

if TYPE_CHECKING:
    NameOrObject = Any
else:
    NameOrObject = str  # A parser would import a class that a file names, so the command line accepts names only.


def find_part(part: object, setting: str, *kinds: type) -> Any:
    """Return a class, a function or an object of `kinds`, which may be given by its import path.

    Raises the errors of `import_callable`, and UsageError for other values of `setting`.
    """
    target = part
    if isinstance(part, str):
        target = import_callable(part)
    if not callable(target) and not isinstance(target, kinds):
        raise UsageError(f"{setting} must be a name, a class or a function, not {str(part)[:80]}")
    return target


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
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    own: Mapping[str, object] = {}
    if isinstance(build, partial):
        own = build.keywords
    return {name: value for name, value in settings.items() if name not in own and (takes_any or name in parameters)}


def build_part(part: object, setting: str, kind: type, *arguments: object, **settings: object) -> Any:
    """Return an object of `kind`: `part` itself, or the result of a class or function that may be given by its name.

    Only those `settings` are passed that the signature accepts. Raises UsageError if the call fails or returns another
    kind of object.
    """
    target, name = find_part(part, setting, kind), part_name(part)
    if isinstance(target, kind):
        return target
    try:
        built = target(*arguments, **accepted_arguments(target, settings))
    except TypeError as error:
        raise UsageError(f"{setting}: {name} has another signature: {first_line(error)}") from error
    if not isinstance(built, kind):
        raise UsageError(f"{name} must return a {kind.__module__}.{kind.__name__}, not a {type(built).__name__}")
    return built


def optional_function(target: str, purpose: str) -> Any:
    """Return a function of an extra, `module:function`; raise UsageError for `purpose` without its folder."""
    module, _, function = target.partition(":")
    try:
        return getattr(import_module(module), function)
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("cifar_lit."):
            raise
        raise UsageError(f"{purpose} is missing in this installation, with {module}: install cifar-lit again") from None


def is_import_path(name: str) -> bool:
    """Return whether a name of a net or data set is dotted, such as `my_nets.MyNet`."""
    return "." in name and all(part.isidentifier() for part in name.split("."))


def check_no_file(name: str) -> None:
    """Raise UsageError for a Python file, such as `my_nets.py`, instead of a dotted name."""
    file, _, member = name.partition(":")
    if file.endswith(".py"):
        raise UsageError(f"{name} is a file: name a class or function in it, as {Path(file).stem}.{member or 'NAME'}")


def import_callable(path: str) -> Callable[..., object]:
    """Import the class or function with a dotted name.

    Raises:
        UsageError: if the name or its module is missing, or it is the name of a file.
        Failure: if its module cannot be imported.
    """
    check_no_file(path)
    module_name, _, name = path.rpartition(".")
    try:
        module = import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(f"{path}: there is no module {error.name!r} here or on PYTHONPATH") from None
        raise Failure(f"{module_name} cannot be imported: {type(error).__name__}: {first_line(error)}") from error
    if not hasattr(module, name):
        names = [each for each in vars(module) if not each.startswith("_")]
        raise UsageError(f"{module_name} has no {name!r}.{nearest(name, names)}")
    target: Callable[..., object] = getattr(module, name)
    return target
