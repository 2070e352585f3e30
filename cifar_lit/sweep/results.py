"""Results of a sweep: table, confirmation of the best trial, plots, trials.csv, best.yaml and sweep.html."""

from __future__ import annotations

import csv
import warnings
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import optuna
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib import pyplot
from optuna.importance import PedAnovaImportanceEvaluator
from optuna.trial import FrozenTrial, TrialState, create_trial
from optuna.visualization import matplotlib as plots

from cifar_lit.files import atomic_write, write_text
from cifar_lit.stats import limits_text, mean_interval, verdict
from cifar_lit.sweep.trials import Job
from cifar_lit.text import csv_cell, printable, printable_lines


def text(value: Any) -> str:
    """Return a short text of a parameter or a metric."""
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else printable(str(value))


def rows_of(trials: Sequence[FrozenTrial], objectives: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row per trial with all columns of trials.csv."""
    names = dict.fromkeys(name for trial in trials for name in trial.params)
    return [
        {
            "trial": trial.number,
            "state": trial.state.name.lower(),
            **dict(zip(objectives, trial.values or [None] * len(objectives), strict=False)),
            **{name: trial.params.get(name) for name in names},
            "seconds": trial.duration and round(trial.duration.total_seconds(), 1),
            "run": trial.user_attrs.get("run"),
            "error": trial.user_attrs.get("error"),
        }
        for trial in trials
    ]


def ranked(study: optuna.Study, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Return the complete trials, best first by the first objective. With two, only the Pareto front."""
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    if len(study.directions) > 1:  # the study may have further trials, which do not count
        counted = optuna.create_study(directions=study.directions)
        counted.add_trials([create_trial(values=trial.values) for trial in complete])
        complete = [complete[trial.number] for trial in counted.best_trials]
    is_max = study.directions[0] == optuna.study.StudyDirection.MAXIMIZE
    return sorted(complete, key=lambda trial: trial.values[0], reverse=is_max)


def conclusion(objective: str, maximised: bool, gains: Sequence[float], lost: int) -> str:
    """Return a sentence on whether the gain of the best trial holds. gains: best minus starting recipe, by seed."""
    missing = f" {lost} of the trainings failed." if lost else ""
    if len(gains) < 2:
        return f"The gain is not confirmed: fewer than two seeds gave a pair of results.{missing}"
    result, significance = mean_interval(gains), verdict(gains)
    is_better = (result["mean"] > 0) == maximised
    answer = "The gain holds" if is_better and significance == "significant" else "The gain is not confirmed"
    limits = limits_text(result, "+.4f")
    interval = f"95 % interval {limits}" if limits else significance
    return (
        f"{answer}: {objective} changes by {result['mean']:+.4f} on average, {interval} "
        f"(paired t test, {len(gains)} new seeds, the same validation images).{missing}"
    )


def draw(study: optuna.Study, folder: Path) -> dict[str, str]:
    """Write the plots that the trials allow. Return title and PNG in base64."""
    drawers: dict[str, Callable[[optuna.Study], Any]] = {
        "history": plots.plot_optimization_history,
        "importance": partial(plots.plot_param_importances, evaluator=PedAnovaImportanceEvaluator()),
        "slice": plots.plot_slice,
    }
    if len(study.directions) > 1:
        drawers = {"pareto-front": plots.plot_pareto_front}
    pictures = {}
    for name, drawer in drawers.items():
        with matplotlib.rc_context({"backend": "agg", "text.parse_math": False}), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                axes = drawer(study)
            except (ValueError, RuntimeError):  # too few trials, or all are equal
                continue
            figure = getattr(axes, "figure", None) or axes.flat[0].figure
            with atomic_write(folder / f"{name}.png") as partial_file:
                figure.savefig(partial_file, format="png", dpi=110, bbox_inches="tight")
            pyplot.close(figure)
        pictures[name] = b64encode((folder / f"{name}.png").read_bytes()).decode()
    return pictures


def write_results(
    folder: Path, job: Job, best: Sequence[Mapping[str, Any]], recipe: Mapping[str, Any], sentences: Sequence[str]
) -> None:
    """Write trials.csv, best.yaml, the plots and sweep.html.

    Args:
        folder: folder of the sweep.
        job: the trials.
        best: rows of the best of them.
        recipe: settings of best.yaml.
        sentences: begins best.yaml and the page.
    """
    rows = rows_of(job.trials(), job.objectives)
    with atomic_write(folder / "trials.csv") as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows({key: csv_cell(value) for key, value in row.items()} for row in rows)
    recipe_text = yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True)
    write_text(folder / "best.yaml", "".join(f"# {printable(line)}\n" for line in sentences) + recipe_text)
    page = Environment(
        loader=PackageLoader("cifar_lit.sweep", "."), autoescape=True, undefined=StrictUndefined,
        finalize=lambda value: printable_lines(text(value) if value is None or isinstance(value, float) else value),
        trim_blocks=True, lstrip_blocks=True,
    ).get_template("sweep.html.j2")  # fmt: skip
    pictures = draw(job.study, folder)
    values = {"sentences": sentences, "best": best, "rows": rows, "recipe": recipe_text, "pictures": pictures}
    write_text(folder / "sweep.html", page.render(title=folder.name, **values))
