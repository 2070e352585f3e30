"""Settings of a training as plain values, and which of them may change when it is resumed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from yaml.constructor import ConstructorError

from cifar_lit.base.errors import UsageError, nearest
from cifar_lit.base.plugins import part_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# Settings of the program and the Trainer that may change when a training is resumed: devices, logging and places. They
# do not change what is computed, except for rounding. Data and features name theirs as `may_change`.
MAY_CHANGE = {
    "ckpt_path", "weights_only", "logs", "logger", "checkpoint_every", "rank_timeout", "threads",
    "trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.strategy", "trainer.precision",
    "trainer.plugins", "trainer.sync_batchnorm", "trainer.benchmark", "trainer.deterministic",
    "trainer.logger", "trainer.log_every_n_steps", "trainer.profiler", "trainer.default_root_dir",
    "trainer.detect_anomaly", "trainer.enable_progress_bar", "trainer.enable_model_summary",
    "trainer.num_sanity_val_steps", "trainer.max_time",
}  # fmt: skip
# May be raised if nothing depends on the length of the training. A later `max_steps` would not be exact: Lightning
# counts the epoch in which a training reaches it as complete.
END = "trainer.max_epochs"


Options = TypeVar("Options", bound="DataclassInstance")


def options_of(kind: type[Options], options: Mapping[str, Any] | None, setting: str, owner: str) -> Options:
    """Return an instance of a dataclass from options by name, such as those of a recipe.

    Args:
        kind: the dataclass. Values of numbers, switches and texts are checked; they may be None if their default is.
        setting: where the options come from, such as `model.optimizer_options`.
        owner: begins the sentence about valid names, such as "muon has".

    Raises:
        UsageError: for an unknown name, or a value of another type.
    """
    if options is None:
        return kind()
    check_names(kind, options, setting, owner)
    types = {field.name: str(field.type) for field in fields(kind)}
    for name, value in options.items():
        if value is None and types[name].endswith("| None"):
            continue
        wanted, kinds = _KINDS.get(types[name].removesuffix(" | None"), ("", [type(value)]))
        if type(value) not in kinds:
            raise UsageError(f"{setting}.{name} must be {wanted}, not {value!r}")
    return kind(**options)


def group_of(kind: type[Options], settings: Options | Mapping[str, Any] | None, setting: str) -> Options:
    """Return a group of settings that is given as an object or by name; None for the defaults."""
    if settings is None or isinstance(settings, Mapping):
        return options_of(kind, settings, setting, "It has")
    if not isinstance(settings, kind):
        raise UsageError(f"{setting} must be settings by name, or {kind.__name__}(…), not {settings!r}")
    return settings


def check_names(kind: type[DataclassInstance], options: Mapping[str, object], setting: str, owner: str) -> None:
    """Raise UsageError if an option is no field of a dataclass. Arguments: see `options_of`."""
    names = [field.name for field in fields(kind)]
    for name in options:
        if name not in names:
            hint = nearest(str(name), names)
            raise UsageError(f"{setting} has no setting {name!r}.{hint} {owner} {', '.join(names)}.")


# A value of each type in words, and the types of such values. YAML's true and false are no numbers.
_KINDS: dict[str, tuple[str, list[type]]] = {
    "bool": ("true or false", [bool]),
    "int": ("a whole number", [int]),
    "float": ("a number", [int, float]),
    "str": ("text", [str]),
}


class _UniqueKeys(yaml.SafeLoader):
    """YAML's loader of plain values, which would silently take the last of equal keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Raise ConstructorError for a repeated key."""
        keys = set()
        for key, _ in node.value:
            if key.value in keys and key.value != "<<":
                fault = f"{key.value} stands there a second time: remove one of them"
                raise ConstructorError(problem=fault, problem_mark=key.start_mark)
            keys.add(str(key.value))
        return super().construct_mapping(node, deep)


def plain_values(file: Path) -> Any:
    """Return the values in a configuration file; empty for an empty file. Raise UsageError for invalid YAML."""
    try:
        values = yaml.load(file.read_text(encoding="utf-8"), _UniqueKeys)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = ""
        if mark:
            place = f" at line {mark.line + 1}, column {mark.column + 1}"
        remedy = error.problem if isinstance(error, ConstructorError) else "check its indentation and brackets"
        raise UsageError(f"{file} is not valid YAML{place}: {remedy}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{file} is not UTF-8 text: save it as UTF-8") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UsageError(f"{file} must hold settings by name (trainer:, model:, data:), not just text or a list")
    return values


def plain_settings(group: str, settings: Mapping[str, object]) -> dict[str, object]:
    """Return settings by dotted name as values of JSON. A class, function or object becomes its name."""
    named = {f"{group}.{name}": value for name, value in settings.items()}
    plain: dict[str, object] = json.loads(without_passwords(json.dumps(named, default=part_name, skipkeys=True)))
    return plain


def without_passwords(text: str) -> str:
    """Return text without user, password and secret parameters of the URLs in it."""
    text = re.sub(r"(?<=://)[^/\s\"']+@", "", text)
    secret = r"(?i)([?&][^=&#\s\"']*(?:token|key|sig|secret|pass|auth|cred)[^=&#\s\"']*=)[^&#\s\"']+"
    return re.sub(secret, r"\1", text)


def saved_settings(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in the state of a checkpoint."""
    settings: dict[str, Any] = json.loads(state["settings"])
    return settings


def changed_settings(
    saved: Mapping[str, object],
    given: Mapping[str, object],
    may_change: Iterable[str] = (),
    fixes_length: str | None = None,
) -> dict[str, object]:
    """Return the settings of `given` that differ from those of a run; raise UsageError if one must not change.

    Args:
        saved, given: settings by dotted name. Only names in both are compared.
        may_change: names that may change in addition to MAY_CHANGE.
        fixes_length: what depends on the number of epochs, which then must not grow; None if nothing does.
    """
    free = MAY_CHANGE.union(may_change)
    changed = {
        name: given[name] for name in sorted(saved) if name in given and not _are_equal(saved[name], given[name])
    }
    for name, value in changed.items():
        is_longer = name == END and _is_later(saved[name], value)
        if name in free or (is_longer and not fixes_length):
            continue
        fault = f"{name} was {json.dumps(saved[name])[:200]} in this run, not {json.dumps(value)[:200]}"
        remedy = "leave it out to resume the run, or start a new one"
        if is_longer:
            remedy = f"{fixes_length} depends on the length, so leave it out, or train a new run from these weights"
        raise UsageError(f"{fault}: {remedy}")
    return changed


def _are_equal(old: object, new: object) -> bool:
    """Return whether two values are equal. One number stands for a list of it, as in `data.mean`."""
    if isinstance(old, list):
        return old in (new, [new] * len(old))
    return old == new


def _is_later(old: object, new: object) -> bool:
    return isinstance(old, int) and isinstance(new, int) and 0 < old < new
