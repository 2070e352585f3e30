"""Read a sweep file, and check it with the messages of the command line before the first trial."""

from __future__ import annotations

import json
import math
import random
import re
import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jsonargparse import ArgumentError, Namespace
from optuna.trial import BaseTrial, FixedTrial

from cifar_lit.cli.errors import explain_parser_error, long_flags
from cifar_lit.cli.fit import TrainingCLI, check_settings
from cifar_lit.cli.flags import OWN, PARTS, SHORT, parse
from cifar_lit.cli.trust import further_files
from cifar_lit.errors import UsageError, check_choice, first_line, nearest
from cifar_lit.plugins import check_allowed
from cifar_lit.runs.config_file import check_choices, plain_values
from cifar_lit.text import NOT_A_FILE_NAME, duration_seconds, is_file_name
from cifar_lit.training.metrics import value_names

KEYS = ("name", "recipe", "settings", "search", "objective", "sampler", "pruner", "trials", "time", "seed")
FIGURES = ("train/loss", "train/accuracy", "train_seconds", "images_per_second", "parameters")  # besides val/ metrics
SPLIT = ("data.val_size", "data.split.seed", "data.split.folds", "data.split.fold")
MAX_GRID = 1000  # trials
Direction = Literal["minimize", "maximize"]


class Parameter(NamedTuple):
    """A searched setting: all its choices, or else the arguments of Optuna's suggest_int or suggest_float."""

    name: str
    choices: list[object]
    numbers: dict[str, Any]
    when: dict[str, list[object]]  # values of other searched settings for which this one is searched

    @property
    def limits(self) -> list[Any]:
        """All choices, or the lowest and the highest number."""
        return self.choices or [self.numbers["low"], self.numbers["high"]]

    def suggest(self, trial: BaseTrial) -> object:
        """Return the value of an Optuna trial; raise ValueError if it is not in the search space."""
        if self.choices:
            return self.choices[self.values().index(trial.suggest_categorical(self.name, self.values()))]
        value: float
        if all(isinstance(number, int) for number in self.numbers.values()):
            value = trial.suggest_int(self.name, **self.numbers)
        else:
            value = trial.suggest_float(self.name, **self.numbers)
        if not self.numbers["low"] <= value <= self.numbers["high"]:  # the database may come from someone else
            raise ValueError(f"{self.name} {value:g} is out of range")
        return value

    def values(self) -> list[Any]:
        """Return all values as Optuna stores them; none if these are too many for a grid."""
        if self.choices:
            return [json.dumps(value) if isinstance(value, list | dict) else value for value in self.choices]
        low, high = self.limits
        step = self.numbers.get("step", 1)
        if "step" not in self.numbers and not isinstance(low + high, int):
            return []
        count = round((high - low) / step) + 1
        if count > MAX_GRID:
            return []
        return [round(low + index * step, 12) for index in range(count)]


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
        self.settings = _by_name("settings", content.get("settings"))
        self.parameters = self._search(path, content["search"])
        self.objectives = _directions(content["objective"])
        self.sampler = content.get("sampler", "tpe")
        check_choice("sampler", self.sampler, ("tpe", "random", "grid"))
        self.pruner = content.get("pruner", "none" if len(self.objectives) > 1 else "median")
        check_choice("pruner", self.pruner, ("median", "none"))
        if len(self.objectives) > 2 or (len(self.objectives) == 2 and self.pruner != "none"):
            raise UsageError("objective names one metric, or two without a pruner (pruner: none) for a Pareto front")
        self.seconds = math.inf
        if "time" in content:
            seconds = duration_seconds(str(content["time"]))
            if seconds is None:
                raise UsageError(f"time must be a duration such as 90m or 2h, not {content['time']}")
            self.seconds = seconds
        self.seed = _whole_number("seed", content.get("seed", 0), 0)
        self.trials: float = 40
        if "trials" in content:
            self.trials = _whole_number("trials", content["trials"], 1)
        elif "time" in content or self.sampler == "grid":
            self.trials = math.inf

    def _search(self, path: Path, search: object) -> list[Parameter]:
        parameters: list[Parameter] = []
        for name, entry in _by_name("search", search).items():
            if name in SPLIT:
                raise UsageError(f"{path}: {name} cannot be searched, as all trials need the same validation images")
            if name in self.settings or name in OWN:
                raise UsageError(f"{path}: {name} cannot be searched, as it is fixed or no setting: leave it out")
            try:
                parameters.append(_parameter(name, entry))
            except (ValueError, TypeError, UserWarning) as error:
                raise UsageError(f"search: {name}: {first_line(error)}") from None
        parameters.sort(key=lambda parameter: len(parameter.when) > 0)
        choices = {parameter.name: parameter.choices for parameter in parameters if not parameter.when}
        for parameter in parameters:
            for name, allowed in parameter.when.items():
                if not allowed or any(value not in choices.get(name, ()) for value in allowed):
                    reason = f"{name} must have these choices in search, and no condition of its own"
                    raise UsageError(f"search: {parameter.name}: {reason}")
        return parameters

    def suggest(self, trial: BaseTrial) -> dict[str, object]:
        """Return the searched settings of an Optuna trial by dotted name."""
        values: dict[str, object] = {}
        for parameter in self.parameters:
            if all(values[name] in allowed for name, allowed in parameter.when.items()):
                values[parameter.name] = parameter.suggest(trial)
        return values

    def grid(self) -> list[dict[str, object]]:
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
        count = int(min(self.trials, len(combinations)))
        return random.Random(self.seed).sample([*combinations.values()], len(combinations))[:count]

    def check(self, words: list[str]) -> Namespace:
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
        metrics = [f"val/{name}" for name in value_names(True, base.model.metrics or {})]
        for objective in self.objectives:
            check_choice("objective", objective, (*metrics, *FIGURES))
        return base


def nested(settings: Mapping[str, object], base: dict[str, Any]) -> dict[str, Any]:
    """Return `base`, the values of a configuration, with further settings by dotted name."""
    for name, value in settings.items():
        *groups, last = name.split(".")
        target = base
        for group in groups:
            if not isinstance(target.get(group), dict):
                target[group] = {}
            target = target[group]
        target[last] = value
    return base


class _Settings(TrainingCLI):
    """Settings of a training, without data, net and Trainer."""

    def check(self, values: Mapping[str, object]) -> Namespace:
        """Return all settings with those of a file, by dotted name; raise UsageError if they are invalid."""
        content = nested(values, {})
        for file in further_files(content, Path()):
            raise UsageError(f"the sweep refers to settings in {file[:200]!r}, which is not read")
        recipe = deepcopy(self.config)
        for part in PARTS:
            if content.get("model", {}).get(part, recipe.fit.model[part]) != recipe.fit.model[part]:
                recipe.fit.model[f"{part}_options"] = None
        try:
            settings = self.parser.parse_object({"fit": content}, recipe).fit
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


def _by_name(place: str, mapping: object) -> dict[str, object]:
    """Return a mapping with long names of settings; raise UsageError for other values."""
    mapping = mapping or {}
    if not isinstance(mapping, dict) or {"trainer", "model", "data"} & mapping.keys():
        raise UsageError(f"{place} must hold settings by dotted name, such as model.lr")
    return {SHORT.get(str(name), str(name)): value for name, value in mapping.items()}


def _check_keys(place: str, mapping: Mapping[object, object], keys: Sequence[str]) -> None:
    for key in map(str, mapping):
        if key not in keys:
            raise UsageError(f"{place} has an unknown key {key!r}.{nearest(key, keys)} There are {', '.join(keys)}.")


def _directions(objective: object) -> dict[str, Direction]:
    if isinstance(objective, str):
        objective = [objective]
    if isinstance(objective, list):
        objective = dict.fromkeys(objective)
    if not isinstance(objective, dict):
        raise UsageError(f"objective must name a metric, such as val/accuracy, not {objective}")
    directions: dict[str, Direction] = {}
    for name, direction in objective.items():
        if not direction:
            is_cost = re.search("loss|seconds|error|parameters", str(name))
            direction = "minimize" if is_cost else "maximize"
        check_choice(f"objective {name}", direction, ("maximize", "minimize"))
        directions[str(name)] = direction
    return directions


def _whole_number(key: str, value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 31:
        raise UsageError(f"{key} must be a whole number of {least} or more, not {value}")
    return value


def _parameter(name: str, entry: object) -> Parameter:
    """Return a searched setting; raise ValueError, TypeError or UserWarning for an invalid search space."""
    if not isinstance(entry, dict):
        entry = {}
    _check_keys(f"search: {name}", entry, ("range", "log", "choice", "step", "if"))
    spaces = [entry[kind] for kind in ("range", "log", "choice") if kind in entry]
    if len(spaces) != 1 or not isinstance(spaces[0], list) or not spaces[0]:
        raise ValueError("name one space with values, such as {log: [0.05, 0.5]}, {range: [1, 8]} or {choice: [a, b]}")
    space = spaces[0]
    when = {}
    for key, value in _by_name(f"search: {name}: if", entry.get("if")).items():
        when[key] = value if isinstance(value, list) else [value]
    if "choice" in entry:
        if "step" in entry or any(value in space[:index] for index, value in enumerate(space)):
            raise ValueError("a choice has no step and no value twice")
        return Parameter(name, space, {}, when)
    low, high = map(_number, space)
    numbers = {"low": low, "high": high, "log": "log" in entry}
    if "step" in entry:
        numbers["step"] = _number(entry["step"])
    parameter = Parameter(name, [], numbers, when)
    with warnings.catch_warnings(action="error"):  # a step that does not divide the range
        parameter.suggest(FixedTrial({name: low}))
    return parameter


def _number(value: Any) -> float:
    """Return a number of YAML, which reads 1e-3 as text."""
    if isinstance(value, bool) or not math.isfinite(float(value)):
        raise ValueError(f"{value} is no finite number")
    return value if isinstance(value, int) else float(value)
