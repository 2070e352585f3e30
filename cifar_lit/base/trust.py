"""Code from files: which classes the settings may name that are found beside a run or in a checkpoint.

Importing a class runs the code of its module. What a user types, and a file named with --config or --recipe, is the
user's own: it may name any class, as in a Python program. Settings that come with a run (config.yaml, hyper-parameters
of a checkpoint, metadata of a model.safetensors) may come from anyone. They may name only

- classes of `PACKAGES`,
- classes of packages that the user names in the same command (`allow_typed`),
- any class with --trust, or `load(…, trust=True)`.

Checkpoints are read with `torch.load(weights_only=True)`, settings with `yaml.safe_load`. Neither runs code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cifar_lit.base.errors import UsageError
from cifar_lit.base.files import is_below
from cifar_lit.base.plugins import import_callable, is_import_path

# Other parts of torch start processes or download code: torch.distributed, torch.hub.
PACKAGES = ("cifar_lit", "lightning", "timm", "torch.nn", "torch.optim", "torchmetrics", "torchvision")
PARTS = ("net", "optimizer", "schedule", "loss", "dataset")  # settings that our registries import
PLACES = ("default_root_dir", "dirpath", "filename", "name", "save_dir", "sub_dir", "version")  # in Lightning's classes
HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters", "hparams", "module_arguments")  # in checkpoints
REFUSED = "the settings of this run name {}: add --trust if you trust them, as code may run (in Python: trust=True)"
_EVERYTHING = "*"
# The package of an import path. Characters of a file's path around it are excluded.
_PACKAGE = re.compile(r"(?<![\w./\\-])([^\W\d]\w*)(?:\.[^\W\d]\w*)+(?![\w./\\*-])")
_typed: set[str] = set()  # packages that the user has named, or _EVERYTHING


class UntrustedName(UsageError):
    """A name to import that comes from a file and that the user has neither typed nor trusted."""


def allow_typed(words: Iterable[str], trust: bool = False) -> None:
    """Allow the packages of the import paths in the words of a command line, and in the YAML files named there.

    trust: allow every package.
    """
    for word in words:
        text = word
        path = Path(word.rpartition("=")[2])
        if path.suffix in (".yaml", ".yml") and path.expanduser().is_file():
            text = path.expanduser().read_text(encoding="utf-8", errors="replace")
        elif os.path.exists(path):  # noqa: PTH110 (Path raises errors for impossible names)
            continue  # the name of a file or folder, which others may have chosen
        _typed.update(_PACKAGE.findall(text))
    if trust:
        _typed.add(_EVERYTHING)


@contextmanager
def trusting(trust: bool) -> Iterator[None]:
    """Allow every package within the context, if `trust`."""
    before = {*_typed}
    if trust:
        _typed.add(_EVERYTHING)
    try:
        yield
    finally:
        _typed.clear()
        _typed.update(before)


def check_name(name: str) -> None:
    """Raise UntrustedName for an import path from a file, unless it names a trusted class; accept other names."""
    if not _is_typed(name) and not _is_library_part(name):
        raise UntrustedName(REFUSED.format(name))


def check_found(settings: object, logs: Path, words: Sequence[str]) -> None:
    """Raise UsageError if settings that were found beside a run name classes or places that need --trust.

    logs: the folder that holds the run. words: the flags that were typed, whose values need no trust.
    """
    values = {word.rpartition("=")[2] for word in words}
    for part in untrusted_parts(settings, logs):
        if not _is_typed(part) and part not in values:
            raise UntrustedName(REFUSED.format(part))


def untrusted_parts(settings: object, logs: Path) -> list[str]:
    """Return the classes and places in settings of a run that need --trust if they are found beside it."""
    found = []
    for key, text in leaves(settings):
        is_trusted = True
        if key[-1] == "class_path":
            is_trusted = _is_in(text, PACKAGES)
        elif key[-1] in PARTS:
            is_trusted = _is_library_part(text)
        elif key[0] == "trainer" and key[-1] in PLACES:
            is_trusted = is_below(text, logs) or is_below(text)
        if not is_trusted:
            found.append(text)
    return found


def limit_parser() -> None:
    """Let the parser of the command line import only trusted classes, in this process."""
    if _EVERYTHING in _typed:
        return
    from jsonargparse import set_parsing_settings  # not needed to load a net

    allowed = sorted({*PACKAGES, *_typed} - {"jsonargparse"})
    set_parsing_settings(
        import_path_denylist=["*"], import_path_allowlist=allowed, instantiate_subclass_spec_in_any=False
    )


def leaves(settings: object, key: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (names, text) of each value in nested settings."""
    if isinstance(settings, dict):
        for name, value in settings.items():
            yield from leaves(value, (*key, str(name)))
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from leaves(value, key)
    elif settings is not None:
        yield key, str(settings)


class TrustedNames:
    """A mixin for Lightning's classes: `load_from_checkpoint` imports only trusted classes that the file names."""

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Return an instance as Lightning does. Raise UntrustedName for a class that only the file names."""
        from torch import load

        contents = load(checkpoint_path, map_location="cpu", weights_only=True)
        for group in HYPER_PARAMETERS:
            for key, text in leaves(contents.get(group)):
                if key[-1] not in kwargs and (key[-1] in PARTS or "metrics" in key):
                    check_name(text)
        kwargs["_instantiator"] = None  # Lightning would let the file's settings name classes
        return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)  # type: ignore[misc]


def _is_typed(name: str) -> bool:
    return _EVERYTHING in _typed or name.partition(".")[0] in _typed


def _is_in(name: str, packages: Iterable[str]) -> bool:
    return any(name.startswith(f"{package}.") for package in packages)


def _is_library_part(name: str) -> bool:
    """Return whether a name is a class of `PACKAGES` for nets, optimizers or schedules, or no import path.

    Functions of `PACKAGES` may do more.
    """
    if not is_import_path(name):
        return True
    if not _is_in(name, PACKAGES):
        return False
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    part = import_callable(name)
    return isinstance(part, type) and issubclass(part, (Module, Optimizer, LRScheduler))
