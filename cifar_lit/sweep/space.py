"""Read and check a sweep file: the starting recipe, the searched settings, objectives and budget."""

from __future__ import annotations

import json
import math
import random
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FixedTrial

from cifar_lit.cli.flags import OWN, SHORT
from cifar_lit.errors import UsageError, check_choice, first_line, nearest
from cifar_lit.runs.config_file import plain_values
from cifar_lit.text import NOT_A_FILE_NAME, is_file_name

KEYS = ("name", "recipe", "settings", "search", "objective", "sampler", "pruner", "trials", "time", "seed")
KINDS = ("range", "log", "choice")
MINIMISED = re.compile("loss|seconds|error|parameters")  # in the name of an objective
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
SPLIT = ("data.val_size", "data.split_seed", "data.folds", "data.fold")
MAX_GRID = 1000  # trials
MAX_COMBINATIONS = 10_000
MAX_PARAMETERS = 100


class Parameter(NamedTuple):
    """A searched setting. when: values of other searched settings for which this one is searched."""

    name: str
    space: Any  # distribution of Optuna
    choices: Sequence[Any]  # empty for numbers
    when: Mapping[str, Sequence[Any]]

    def values(self) -> Sequence[Any]:
        """Return all values as Optuna stores them, none if there are more than MAX_COMBINATIONS."""
        if self.choices:
            return self.space.choices
        low, high, step = self.space.low, self.space.high, self.space.step
        if step is None or (high - low) / step >= MAX_COMBINATIONS:
            return ()
        values = [low + index * step for index in range(round((high - low) / step) + 1)]
        return [round(value, 12) for value in values]


@dataclass(frozen=True)
class SweepFile:
    """Contents of a sweep file. Trials or seconds may be infinite."""

    name: str
    recipe: str
    settings: Mapping[str, Any]
    parameters: Sequence[Parameter]
    objectives: Mapping[str, Any]  # direction by name
    sampler: str
    pruner: str
    trials: float
    seconds: float
    seed: int

    def suggest(self, trial: Any) -> dict[str, Any]:
        """Return the searched settings of an Optuna trial. Raise ValueError for values out of the search space."""
        values: dict[str, Any] = {}
        for name, space, choices, when in self.parameters:
            if not all(key in values and values[key] in allowed for key, allowed in when.items()):
                continue
            if choices:
                values[name] = choices[space.choices.index(trial.suggest_categorical(name, space.choices))]
                continue
            suggest = trial.suggest_int if isinstance(space, IntDistribution) else trial.suggest_float
            values[name] = suggest(name, space.low, space.high, step=space.step, log=space.log)
            if not space.low <= values[name] <= space.high:  # the database may come from someone else
                raise ValueError(f"{name} {values[name]:g} is not in {space.low:g} … {space.high:g}")
        return values

    def grid(self) -> list[dict[str, Any]]:
        """Return the parameters of all combinations in random order, at most `MAX_GRID`."""
        spaces = {parameter.name: parameter.values() for parameter in self.parameters}
        if not all(spaces.values()) or math.prod(map(len, spaces.values())) > MAX_COMBINATIONS:
            limit = f"and at most {MAX_COMBINATIONS:,} combinations"
            raise UsageError(f"sampler grid: use choice, or range with a step, for every setting, {limit}")
        combinations = {}
        for values in product(*spaces.values()):
            trial = FixedTrial(dict(zip(spaces, values, strict=True)))
            self.suggest(trial)
            combinations[str(trial.params)] = trial.params  # equal ones differ in settings that a condition leaves out
        in_order = list(combinations.values())
        random.Random(self.seed).shuffle(in_order)
        return in_order[: int(min(self.trials, MAX_GRID))]

    def corners(self) -> Iterator[dict[str, Any]]:
        """Yield settings that together contain each bound and each choice."""
        limits = {each.name: each.choices or (each.space.low, each.space.high) for each in self.parameters}
        base = {each.name: limits[each.name][0] for each in self.parameters if not each.when}
        for parameter in self.parameters:
            required = {name: allowed[0] for name, allowed in parameter.when.items()}
            for value in limits[parameter.name]:
                yield {**base, **required, parameter.name: value}


def read_sweep(file: Path) -> SweepFile:
    """Read a sweep file; raise UsageError for its first fault. Names and values of settings are not checked."""
    content = plain_values(file) or {}
    _check_keys(str(file), content, KEYS)
    if missing := [key for key in ("recipe", "search", "objective") if not content.get(key)]:
        raise UsageError(f"{file} has no {missing[0]}: see `cifar-lit sweep --help` for an example")
    settings, search, objective = content.get("settings") or {}, content["search"], content["objective"]
    if not isinstance(settings, dict) or not isinstance(search, dict) or len(search) > MAX_PARAMETERS:
        raise UsageError(f"{file}: settings and search hold up to {MAX_PARAMETERS} settings by dotted name (model.lr)")
    settings = {SHORT.get(str(name), str(name)): value for name, value in settings.items()}
    parameters = _sorted([_parameter(SHORT.get(str(name), str(name)), entry) for name, entry in search.items()])
    for name in (parameter.name for parameter in parameters):
        if name in settings or name in OWN or name in SPLIT:
            reason = "settings fixes it" if name in settings else "it is no setting of a training"
            reason = "all trials need the same validation images" if name in SPLIT else reason
            raise UsageError(f"{file}: {name} cannot be searched, as {reason}: leave it out")
    if not isinstance(objective, dict):
        objective = dict.fromkeys(objective if isinstance(objective, list) else [objective])
    objectives = {}
    for name, direction in objective.items():
        objectives[str(name)] = direction or ("minimize" if MINIMISED.search(str(name)) else "maximize")
        check_choice(f"objective {name}", objectives[str(name)], ("maximize", "minimize"))
    sampler = content.get("sampler", "tpe")
    pruner = content.get("pruner", "none" if len(objectives) > 1 else "median")
    check_choice("sampler", sampler, ("tpe", "random", "grid"))
    check_choice("pruner", pruner, ("median", "none"))
    if len(objectives) > 2 or (len(objectives) == 2 and pruner != "none"):
        raise UsageError("objective names one metric, or two without a pruner (pruner: none) for a Pareto front")
    duration = content.get("time")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", str(duration))
    if duration is not None and not match:
        raise UsageError(f"time must be a duration such as 90m or 2h, not {duration}")
    seconds = float(match[1]) * UNITS[match[2]] if match else math.inf
    for key, least in (("trials", 1), ("seed", 0)):
        value = content.get(key, least)
        if not (type(value) is int and least <= value < 1 << 31):
            raise UsageError(f"{key} must be a whole number of {least} or more, not {value}")
    trials = content.get("trials", math.inf if match or sampler == "grid" else 40)
    name, recipe, seed = str(content.get("name") or file.stem), str(content["recipe"]), content.get("seed", 0)
    if not is_file_name(name):
        raise UsageError(f"name: {name!r} cannot name a folder{NOT_A_FILE_NAME}")
    return SweepFile(name, recipe, settings, parameters, objectives, sampler, pruner, trials, seconds, seed)


def _check_keys(place: str, mapping: Mapping[Any, Any], keys: Sequence[str]) -> None:
    for key in mapping:
        if key not in keys:
            hint = nearest(str(key), keys)
            raise UsageError(f"{place} has an unknown key {str(key)!r}.{hint} There are {', '.join(keys)}.")


def _parameter(name: str, entry: Any) -> Parameter:
    """Return a searched setting; raise UsageError for an invalid search space."""
    entry = entry if isinstance(entry, dict) else {}
    _check_keys(f"search: {name}", entry, (*KINDS, "step", "if"))
    kinds = [kind for kind in KINDS if kind in entry]
    values, step, when = entry.get("".join(kinds)), entry.get("step"), entry.get("if") or {}
    if len(kinds) != 1 or not isinstance(values, list) or not values or not isinstance(when, dict):
        example = "{log: [0.05, 0.5]}, {range: [1, 8]} or {choice: [a, b]}"
        raise UsageError(f"search: {name} needs one space with values, such as {example}")
    when = {SHORT.get(str(key), str(key)): each if isinstance(each, list) else [each] for key, each in when.items()}
    try:
        if kinds == ["choice"]:
            if step is not None or any(value in values[:index] for index, value in enumerate(values)):
                raise ValueError("a choice has no step and no value twice")
            stored = [json.dumps(value) if isinstance(value, list | dict) else value for value in values]
            return Parameter(name, CategoricalDistribution(stored), values, when)
        low, high = map(_number, values)
        is_integer = all(type(value) is int for value in (low, high, 0 if step is None else step))
        space = IntDistribution if is_integer else FloatDistribution
        with warnings.catch_warnings(action="error"):  # a step that does not divide the range
            numbers = space(low, high, "log" in kinds, *([] if step is None else [_number(step)]))
        return Parameter(name, numbers, (), when)
    except (ValueError, TypeError, UserWarning) as error:
        raise UsageError(f"search: {name}: {first_line(error)}") from None


def _number(value: Any) -> Any:
    """Return a number of YAML, which reads 1e-3 as text."""
    if isinstance(value, bool) or not math.isfinite(float(value)):
        raise ValueError(f"{value} is no finite number")
    return value if isinstance(value, int) else float(value)


def _sorted(parameters: Sequence[Parameter]) -> list[Parameter]:
    """Return the parameters, each after those that it depends on; raise UsageError for impossible conditions."""
    by_name = {parameter.name: parameter for parameter in parameters}
    for parameter in parameters:
        for name, allowed in parameter.when.items():
            if name not in by_name or not allowed or any(value not in by_name[name].choices for value in allowed):
                reason = f"{name} is not searched, or not with the values of its condition"
                raise UsageError(f"search: {parameter.name}: {reason}.{nearest(name, by_name)}")
    try:
        order = TopologicalSorter({parameter.name: parameter.when.keys() for parameter in parameters}).static_order()
        return [by_name[name] for name in order]
    except CycleError as error:
        raise UsageError(f"search: the conditions of {', '.join(error.args[1][1:])} form a circle") from None
