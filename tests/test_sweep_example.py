"""examples/sweep.py: trials are stored, pruned and continued, and the printed command trains the best settings."""

from __future__ import annotations

import runpy
import shlex
import sys
from pathlib import Path

import pytest
from contract.command_line import config_of, metrics_of, run_command

optuna = pytest.importorskip("optuna")

SCRIPT = Path(__file__).parent.parent / "examples/sweep.py"
SMALL = {"count": 200, "image_size": 16}


def sweep(trials: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run the script on few images in the working folder; return its last lines."""
    text = SCRIPT.read_text().replace('"count": 20_000', '"count": 200, "image_size": 16')
    Path("sweep.py").write_text(text)
    monkeypatch.setattr(sys, "argv", ["sweep.py", "--trials", str(trials), "--epochs", "1"])
    runpy.run_path("sweep.py", run_name="__main__")
    return capsys.readouterr().out.splitlines()[-2:]


def test_trials_are_continued_and_the_printed_command_trains_the_best_settings(
    working_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sweep(1, capsys, monkeypatch)[0].startswith("best of 1 trials: validation accuracy 0.")
    first, command = sweep(1, capsys, monkeypatch)
    study = optuna.load_study(study_name="sweep", storage="sqlite:///sweep.db")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 2 and first.startswith("best of 2 trials")
    assert [*study.trials[0].intermediate_values.values()] == [study.trials[0].value]
    answer = run_command(*shlex.split(command.replace("--seeds 1-5", "--seed 1"))[1:])
    assert answer.code == 0, answer.err
    run = Path("lightning_logs/best-1")
    assert (metrics_of(run)["net"], metrics_of(run)["epochs"]) == ("shapenet", 1)
    assert study.best_params and config_of(run)["model"].items() >= study.best_params.items()


def test_a_trial_that_is_behind_ends_after_its_first_epoch() -> None:
    module = runpy.run_path(str(SCRIPT))
    module["DATA"]["images"].update(SMALL)
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.ThresholdPruner(lower=2))
    study.optimize(lambda trial: module["train"](trial, 3), n_trials=1)
    (trial,) = study.trials
    assert (trial.state.name, [*trial.intermediate_values]) == ("PRUNED", [0])
