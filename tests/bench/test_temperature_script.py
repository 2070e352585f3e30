"""temperature.py and scores.py on short trainings of small nets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import scores
import temperature
from train_once import run_once

import cifar_lit
from cifar_lit.bench.commands import run_module
from cifar_lit.errors import UsageError


def measured(*words: str) -> dict[str, Any]:
    run_module("temperature.py", temperature, ["small.yaml", "--json", "t.json", *words])
    return dict(json.loads(Path("t.json").read_text()))


def test_temperatures_are_fitted_on_held_out_images_and_a_measurement_resumes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = measured("--runs", "1", "--val-size", "0.4")
    both = measured("--runs", "2", "--val-size", "0.4")
    assert both["runs"][0] == first["runs"][0]  # not trained again
    assert [run["seed"] for run in both["runs"]] == [0, 1]
    assert capsys.readouterr().out.count("small.yaml seed ") == 2
    for run in both["runs"]:
        assert run["held_out"] == 40 and run["tempered_loss"] != run["loss"] and run["temperature"] > 0
        assert run["least_error_temperature"] in temperature.GRID and 0 <= run["least_error"] <= 1
    assert both["headline"]["temperature"]["n"] == both["headline"]["temperature of least error"]["n"] == 2
    with pytest.raises(UsageError, match="has another measurement: name another --json file"):
        measured("--runs", "2", "--val-size", "0.2")


def test_a_recipe_is_measured_with_its_own_temperature() -> None:
    (run,) = measured("--runs", "1", "--val-size", "0", "--data.val_size", "0", "--model.temperature", "2")["runs"]
    assert (run["temperature"], run["held_out"]) == (2.0, 0)
    assert "least_error_temperature" not in run  # nothing is held out
    with pytest.raises(UsageError, match="there is no temperature: use a recipe with"):
        run_module("temperature.py", temperature, ["small.yaml", "--val-size", "0", "--data.val_size", "0"])


def test_scores_of_a_run_are_compared_against_drawn_images() -> None:
    run_once("small.yaml", ["--data.val_size", "40"], 0, "logs")
    run_module("scores.py", scores, ["logs/small-1", "--images", "12", "--json", "s.json"])
    headline = json.loads(Path("s.json").read_text())["headline"]
    for name in ("drawn textures", "drawn digits"):
        for score in ("energy", "largest probability", "KNN"):
            for figure in ("AUROC", "FPR95"):
                assert 0 <= headline[f"{name}: {figure}, {score}"]["median"] <= 100
    rejected = [headline[f"rejected test images at --reject {rate:g}"]["median"] for rate in scores.RATES]
    assert rejected == sorted(rejected) and rejected[-1] > rejected[0]
    assert cifar_lit.load("logs/small-1").card.reject is not None
