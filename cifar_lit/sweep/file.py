"""Read a sweep file, and check it with the messages of the command line before the first trial."""

from __future__ import annotations

import json
import math
import random
import re
import warnings
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from jsonargparse import ArgumentError
from optuna.trial import FixedTrial

from cifar_lit.cli.errors import explain_parser_error, long_flags
from cifar_lit.cli.fit import TrainingCLI, check_settings
from cifar_lit.cli.flags import OWN, SHORT, parse
from cifar_lit.cli.trust import further_files
from cifar_lit.errors import UsageError, check_choice, first_line, nearest
from cifar_lit.plugins import check_allowed
from cifar_lit.runs.config_file import check_choices, nested, plain_values
from cifar_lit.text import NOT_A_FILE_NAME, is_file_name
from cifar_lit.training.metrics import TOP, value_names

KEYS = ("name", "recipe", "settings", "search", "objective", "sampler", "pruner", "trials", "time", "seed")
FIGURES = ("train/loss", "train/accuracy", "train_seconds", "images_per_second", "parameters")  # besides val/ metrics
SPLIT = ("data.val_size", "data.split_seed", "data.folds", "data.fold")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MAX_GRID = 1000  # trials


class Parameter(NamedTuple):
    """A searched setting: all its choices, or else the arguments of Optuna's suggest_int or suggest_float.

    when: values of other searched settings for which this one is searched.
    """

    name: str
    choices: list[Any]
    numbers: dict[str, Any]
    when: dict[str, list[Any]]

    @property
    def limits(self) -> list[Any]:
        """All choices, or the lowest and the highest number."""
        return self.choices or [self.numbers["low"], self.numbers["high"]]

    def suggest(self, trial: Any) -> Any:
        """Return the value of an Optuna trial; raise ValueError if it is not in the search space."""
        if self.choices:
            return self.choices[self.values().index(trial.suggest_categorical(self.name, self.values()))]
        is_integer = all(isinstance(number, int) for number in self.numbers.values())
        value = (trial.suggest_int if is_integer else trial.suggest_float)(self.name, **self.numbers)
        if not self.numbers["low"] <= value <= self.numbers["high"]:  # the database may come from someone else
            raise ValueError(f"{self.name} {value:g} is out of range")
        return value

    def values(self) -> list[Any]:
        """Return all values as Optuna stores them; none if these are too many for a grid."""
        if self.choices:
            return [json.dumps(value) if isinstance(value, list | dict) else value for value in self.choices]
        low, high = self.limits
        step = self.numbers.get("step", 1 if isinstance(low + high, int) else 0)
        count = round((high - low) / step) + 1 if step else MAX_GRID + 1
        return [] if count > MAX_GRID else [round(low + index * step, 12) for index in range(count)]


class SweepFile:
    """The content of a sweep file. `objectives` are directions by name; `trials` and `seconds` may be infinite.

    Raise UsageError for its first fault, apart from names and values of settings.
    """

    def __init__(self, path: Path) -> None:
        content = plain_values(path) or {}
        _check_keys(str(path), content, KEYS)
        for key in ("recipe", "search", "objective"):
            if not content.get(key):
                raise UsageError(f"{path} has no {key}: see `cifar-lit sweep --help` for an example")
        self.name, self.recipe = str(content.get("name") or path.stem), str(content["recipe"])
        if not is_file_name(self.name):
            raise UsageError(f"name: {self.name!r} cannot name a folder{NOT_A_FILE_NAME}")
        self.settings, search = _by_name("settings", content.get("settings")), _by_name("search", content["search"])
        self.parameters: list[Parameter] = []
        for name, entry in search.items():
            if name in self.settings or name in OWN or name in SPLIT:
                reason = "all trials need the same validation images" if name in SPLIT else "it is fixed or no setting"
                raise UsageError(f"{path}: {name} cannot be searched, as {reason}: leave it out")
            try:
                self.parameters.append(_parameter(name, entry))
            except (ValueError, TypeError, UserWarning) as error:
                raise UsageError(f"search: {name}: {first_line(error)}") from None
        self.parameters.sort(key=lambda parameter: bool(parameter.when))
        choices = {parameter.name: parameter.choices for parameter in self.parameters if not parameter.when}
        for parameter in self.parameters:
            for name, allowed in parameter.when.items():
                if not allowed or any(value not in choices.get(name, ()) for value in allowed):
                    reason = f"{name} must have these choices in search, and no condition of its own"
                    raise UsageError(f"search: {parameter.name}: {reason}")
        objective = content["objective"]
        if not isinstance(objective, dict):
            objective = dict.fromkeys(objective if isinstance(objective, list) else [objective])
        self.objectives: dict[str, Any] = {}
        for name, direction in objective.items():
            default = "minimize" if re.search("loss|seconds|error|parameters", str(name)) else "maximize"
            self.objectives[str(name)] = direction or default
            check_choice(f"objective {name}", direction or default, ("maximize", "minimize"))
        self.sampler = content.get("sampler", "tpe")
        check_choice("sampler", self.sampler, ("tpe", "random", "grid"))
        self.pruner = content.get("pruner", "none" if len(objective) > 1 else "median")
        check_choice("pruner", self.pruner, ("median", "none"))
        if len(objective) > 2 or (len(objective) == 2 and self.pruner != "none"):
            raise UsageError("objective names one metric, or two without a pruner (pruner: none) for a Pareto front")
        duration = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", str(content.get("time", "1d")))
        if not duration:
            raise UsageError(f"time must be a duration such as 90m or 2h, not {content['time']}")
        self.seconds = float(duration[1]) * UNITS[duration[2]] if "time" in content else math.inf
        self.trials = content.get("trials", math.inf if "time" in content or self.sampler == "grid" else 40)
        self.seed = content.get("seed", 0)
        for key, value, least in (("trials", content.get("trials", 1), 1), ("seed", self.seed, 0)):
            if type(value) is not int or not least <= value < 1 << 31:
                raise UsageError(f"{key} must be a whole number of {least} or more, not {value}")

    def suggest(self, trial: Any) -> dict[str, Any]:
        """Return the searched settings of an Optuna trial by dotted name."""
        values: dict[str, Any] = {}
        for parameter in self.parameters:
            if all(values[name] in allowed for name, allowed in parameter.when.items()):
                values[parameter.name] = parameter.suggest(trial)
        return values

    def grid(self) -> list[dict[str, Any]]:
        """Return Optuna's parameters of all combinations in random order."""
        spaces = {parameter.name: parameter.values() for parameter in self.parameters}
        if not 0 < math.prod(map(len, spaces.values())) <= MAX_GRID:
            limit = f"at most {MAX_GRID} combinations"
            raise UsageError(f"sampler grid: use choice, or range with a step, for every setting, and {limit}")
        combinations = {}
        for values in product(*spaces.values()):
            trial = FixedTrial(dict(zip(spaces, values, strict=True)))
            self.suggest(trial)
            combinations[str(trial.params)] = trial.params  # equal ones differ in settings that a condition leaves out
<<<<<<< HEAD
        return random.Random(self.seed).sample([*combinations.values()], len(combinations))
=======
        count = int(min(self.trials, len(combinations)))
        return random.Random(self.seed).sample([*combinations.values()], len(combinations))[:count]
>>>>>>> w-sweep

    def check(self, words: list[str]) -> Any:
        """Return the settings of the starting recipe with flags; raise UsageError for invalid settings."""
        typed = parse("fit", words)
        if typed.recipe or typed.configs or typed.several or typed.resume is not None:
            reason = "sweep takes its recipe from the file and starts `fit`"
            raise UsageError(f"{reason}: leave the flags of other trainings out")
        for parameter in self.parameters:
            if typed.value(parameter.name) is not None:
                raise UsageError(f"--{parameter.name} is searched: leave the flag out")
        cli = _Settings(parse("fit", ["--recipe", self.recipe, *words]))
        base = cli.check(self.settings)
        lowest = {parameter.name: parameter.limits[0] for parameter in self.parameters if not parameter.when}
        for parameter in self.parameters:
            required = {name: allowed[0] for name, allowed in parameter.when.items()}
            for value in parameter.limits:
                cli.check({**self.settings, **lowest, **required, parameter.name: value})
        metrics = [f"val/{name}" for name in value_names(TOP + 1, base.model.metrics or {})]
        for objective in self.objectives:
            check_choice("objective", objective, (*metrics, *FIGURES))
        return base


class _Settings(TrainingCLI):
    """Settings of a training, without data, net and Trainer."""

    def check(self, values: Mapping[str, Any]) -> Any:
        """Return all settings with those of a file, by dotted name; raise UsageError if they are invalid."""
        content = nested(values, {})
        for file in further_files(content, Path()):
            raise UsageError(f"the sweep refers to settings in {file[:200]!r}, which is not read")
        try:
            settings = self.parser.parse_object({"fit": content}, self.config).fit
        except ArgumentError as error:
            keys = long_flags(self._subcommand_parsers["fit"])
            raise UsageError(explain_parser_error(str(error), keys)) from error
        check_choices(settings.as_dict())
        check_allowed(settings.data.dataset)
        check_settings(settings)
        return settings

    def instantiate_classes(self) -> None:
        """Build nothing."""

    before_instantiate_classes = instantiate_classes

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing."""


def _by_name(place: str, mapping: Any) -> dict[str, Any]:
    """Return a mapping with long names of settings; raise UsageError for other values."""
    if not isinstance(mapping or {}, dict) or {"trainer", "model", "data"} & {*(mapping or {})}:
        raise UsageError(f"{place} must hold settings by dotted name, such as model.lr")
    return {SHORT.get(str(name), str(name)): value for name, value in (mapping or {}).items()}


def _check_keys(place: str, mapping: Mapping[Any, Any], keys: Sequence[str]) -> None:
    for key in map(str, mapping):
        if key not in keys:
            raise UsageError(f"{place} has an unknown key {key!r}.{nearest(key, keys)} There are {', '.join(keys)}.")


def _parameter(name: str, entry: Any) -> Parameter:
    """Return a searched setting; raise ValueError, TypeError or UserWarning for an invalid search space."""
    entry = entry if isinstance(entry, dict) else {}
    _check_keys(f"search: {name}", entry, ("range", "log", "choice", "step", "if"))
    spaces = [entry[kind] for kind in ("range", "log", "choice") if kind in entry]
    if len(spaces) != 1 or not isinstance(spaces[0], list) or not spaces[0]:
        raise ValueError("name one space with values, such as {log: [0.05, 0.5]}, {range: [1, 8]} or {choice: [a, b]}")
    when = {}
    for key, value in _by_name(f"search: {name}: if", entry.get("if")).items():
        when[key] = value if isinstance(value, list) else [value]
    if "choice" in entry:
        if "step" in entry or any(value in spaces[0][:index] for index, value in enumerate(spaces[0])):
            raise ValueError("a choice has no step and no value twice")
        return Parameter(name, spaces[0], {}, when)
    numbers = dict(zip(("low", "high"), map(_number, spaces[0]), strict=True)) | {"log": "log" in entry}
    if "step" in entry:
        numbers["step"] = _number(entry["step"])
    parameter = Parameter(name, [], numbers, when)
    with warnings.catch_warnings(action="error"):  # a step that does not divide the range
        parameter.suggest(FixedTrial({name: numbers["low"]}))
    return parameter


def _number(value: Any) -> Any:
    """Return a number of YAML, which reads 1e-3 as text."""
    if isinstance(value, bool) or not math.isfinite(float(value)):
        raise ValueError(f"{value} is no finite number")
    return value if isinstance(value, int) else float(value)
