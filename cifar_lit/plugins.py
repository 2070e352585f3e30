"""Nets, data sets, optimizers and schedules of the user's own files, by their dotted name, such as `my_nets.MyNet`.

An import runs the code of a module. A name that a Python program passes is imported. A name in a config.yaml, a
checkpoint or a model file may come from anyone: it is imported only if the user typed or trusted it (`allow_imports`).
The working folder may also come from anyone. It is on the import path only while such a module is imported, after all
other folders.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from cifar_lit.errors import Failure, UsageError, first_line, nearest

if TYPE_CHECKING:
    NameOrObject = Any
else:
    NameOrObject = str  # A parser would import a class that a file names, so the command line accepts names only.


MAX_SOURCE = 1 << 18  # characters of a Python file to search for a class
_EVERY_NAME = "*"
_allowed: set[str] = set()
_files_name_parts = False  # within `only_allowed_imports`


class UntrustedName(UsageError):
    """A name to import that the user has neither typed nor trusted."""


def allow_imports(paths: Iterable[str]) -> None:
    """Allow files to name these classes and functions, by their dotted names, in this process."""
    _allowed.update(paths)


@contextmanager
def only_allowed_imports() -> Iterator[None]:
    """Let `import_callable` import only allowed names: within the context, names may come from files."""
    global _files_name_parts
    before, _files_name_parts = _files_name_parts, True
    try:
        yield
    finally:
        _files_name_parts = before


def names_may_be_foreign() -> bool:
    """Return whether this is within `only_allowed_imports`."""
    return _files_name_parts


def check_allowed(name: str) -> None:
    """Raise UntrustedName for a dotted name from a file that the user has neither typed nor trusted."""
    if is_import_path(name) and _allowed.isdisjoint((name, _EVERY_NAME)):
        remedy = "pass the name yourself, or add --trust (in Python, use load(…, trust=True))"
        raise UntrustedName(f"{name} would run code of its module: if you trust the file, {remedy}")


class NamesInCheckpoint:
    """A mixin for Lightning's classes: `load_from_checkpoint` imports only names that the program itself passes."""

    names_are_foreign = False  # whether the settings come from a checkpoint

    @classmethod
    def load_from_checkpoint(cls, *args: object, **kwargs: object) -> Any:
        """Return an instance as Lightning does. Raise UntrustedName for the dotted name of a net in the file."""
        allow_imports(value for value in kwargs.values() if isinstance(value, str))
        with only_allowed_imports():
            loaded = super().load_from_checkpoint(*args, **kwargs)  # type: ignore[misc]
        loaded.names_are_foreign = True
        return loaded


@contextmanager
def all_imports_allowed(trust: bool) -> Iterator[None]:
    """With `trust`, allow `import_callable` to import any name within the context."""
    if not trust:
        yield
        return
    _allowed.add(_EVERY_NAME)
    try:
        yield
    finally:
        _allowed.discard(_EVERY_NAME)


def guard_child_processes() -> None:
    """Keep the working folder off the import path of child processes.

    Python puts the working folder first for `python -c` and in spawned processes. PYTHONSAFEPATH prevents this, but
    also leaves out a script's own folder, which is therefore added to PYTHONPATH.
    """
    if not os.environ.get("PYTHONSAFEPATH"):
        folders = [os.environ.get("PYTHONPATH")]
        if not sys.flags.safe_path:
            folders = [*sys.path[:1], *folders]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
        os.environ["PYTHONSAFEPATH"] = "1"


class _AwayLoader(SourceFileLoader):
    """Import a package with the folder that it is installed in as the working folder."""

    def exec_module(self, module: ModuleType) -> None:
        with chdir(Path(self.path).parents[1]):
            super().exec_module(module)


class _AwayFinder:
    """Find packages that read files of the working folder on import, and give them an `_AwayLoader`.

    torch loads libcusparseLt, whose run path has an empty entry, so the linker would load a `libcuda.so.1` from the
    working folder. matplotlib reads a `matplotlibrc` there, which may be a named pipe or endless, and can start TeX.
    """

    packages = ("torch", "matplotlib")

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.packages:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _AwayLoader(spec.loader.name, spec.loader.path)
        return spec


def guard_packages() -> None:
    """Keep torch and matplotlib from reading the working folder when they are imported."""
    sys.meta_path.insert(0, _AwayFinder())


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
    """Return a function of an extra, `module:function`; raise UsageError for `purpose` without the module."""
    module, _, function = target.partition(":")
    if not Path(__file__).parents[1].joinpath(*module.split(".")).with_suffix(".py").is_file():
        raise UsageError(f"{purpose} is missing in this installation, with {module}: install cifar-lit again")
    return getattr(import_module(module), function)


def is_import_path(name: str) -> bool:
    """Return whether a name of a net or data set is dotted, such as `my_nets.MyNet`."""
    return "." in name and all(part.isidentifier() for part in name.split("."))


def import_module_of(path: str) -> ModuleType:
    """Import the module of a dotted name. A file of the working folder never replaces another module.

    Raises:
        UsageError: if there is no such module.
        Failure: if it cannot be imported.
    """
    name = path.rpartition(".")[0]
    here = str(Path.cwd())
    sys.path.append(here)
    try:
        return import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise UsageError(f"{path}: there is no module {error.name!r} here or on PYTHONPATH") from None
        raise Failure(f"{name} cannot be imported: {type(error).__name__}: {first_line(error)}") from error
    finally:
        sys.path[:] = [folder for folder in sys.path if folder is not here]  # keeps folders that the module added


def check_no_file(name: str) -> None:
    """Raise UsageError for a Python file, such as `nets/my_nets.py` or `my_nets.py:MyNet`, instead of a dotted name."""
    file, _, member = name.partition(":")
    if not file.endswith(".py"):
        return
    path = Path(file).resolve()
    if not path.is_file():
        raise UsageError(f"there is no file {file}: name a class or function as {path.stem}.{member or 'NAME'}")
    with path.open(errors="replace") as stream:
        source = stream.read(MAX_SOURCE)
    found = re.search(r"^class ([a-zA-Z]\w*)", source, re.MULTILINE)
    if found and not member:
        member = found[1]
    remedy = ""
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    else:
        remedy = f", and put {path.parent} on PYTHONPATH"
        path = Path(path.name)
    module = ".".join(path.with_suffix("").parts)
    raise UsageError(f"{name} is a file: name a class or function in it, as {module}.{member or 'NAME'}{remedy}.")


def import_callable(path: str) -> Callable[..., object]:
    """Import the class or function with a dotted name.

    Raises:
        UntrustedName: within `only_allowed_imports`, if the name is not allowed.
        UsageError: if the name is missing in its module, or is the name of a file.
        Failure: if its module cannot be imported.
    """
    check_no_file(path)
    if names_may_be_foreign():
        check_allowed(path)
    module = import_module_of(path)
    name = path.rpartition(".")[2]
    if not hasattr(module, name):
        names = [each for each in vars(module) if not each.startswith("_")]
        raise UsageError(f"{module.__name__} has no {name!r}.{nearest(name, names)}")
    target: Callable[..., object] = getattr(module, name)
    return target
