"""metrics.csv and TensorBoard events of new and resumed runs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import MLFlowLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from cifar_lit.base.errors import Failure, UsageError
from cifar_lit.run import loggers
from cifar_lit.run.folder import RunFolder
from cifar_lit.run.loggers import COLUMNS, CurveFile, TensorBoardCurves, logged_settings, logger_names, start_tracker
from cifar_lit.run.record import read_rows, weights_text
from cifar_lit.run.run import Run
from cifar_lit.training.rows import log_values


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder(tmp_path / "logs", "fast")
    folder.claim()
    yield folder
    folder.release()


def header(run: RunFolder) -> list[str]:
    return (run.path / "metrics.csv").read_text().splitlines()[0].split(",")


def test_each_logging_step_is_a_row_and_each_metric_a_column(run: RunFolder) -> None:
    curves = CurveFile(run)
    assert not (run.path / "metrics.csv").exists()  # nothing is created before the first row
    curves.log_metrics({"train/loss": 2.5, "lr": 0.1, "epoch": 0}, 50)
    assert header(run) == list(COLUMNS)
    curves.log_metrics({"val/loss": 2.25, "val/top5": 0.75, "epoch": 0, "a, b": 1.0}, 60)
    curves.log_metrics({"lr-SGD": 0.5, "val/top5": 1.0}, 70)
    assert header(run)[: len(COLUMNS) + 1] == [*COLUMNS, "val/top5"]
    assert read_rows(run.path / "metrics.csv") == [
        {"epoch": "0", "step": "50", "lr": "0.1", "train/loss": "2.5"},
        {"epoch": "0", "step": "60", "val/loss": "2.25", "val/top5": "0.75", "a, b": "1.0"},
        {"step": "70", "val/top5": "1.0", "lr-SGD": "0.5"},
    ]


def test_a_new_run_creates_the_file_before_its_clock_starts_and_a_resumed_run_keeps_its_file(run: RunFolder) -> None:
    file, rows = run.path / "metrics.csv", ""
    for resumed in (False, True):
        run.resumed = resumed
        training = Run(run, {}, "", {}, "fit")
        callbacks = training.callbacks(validates=False)
        assert callbacks.index(training) < callbacks.index(training.clock)
        curves: Any = CurveFile(run, 12 if resumed else None)
        trainer: Any = SimpleNamespace(is_global_zero=True, fast_dev_run=0, loggers=[curves])
        training.on_train_start(trainer, None)  # type: ignore[arg-type]
        assert file.read_text() == (rows or file.read_text().splitlines()[0] + "\n")
        curves.log_metrics({"train/loss": 1.5}, 13)
        rows = file.read_text()


def test_a_resumed_run_keeps_complete_training_rows_up_to_the_resumed_step(run: RunFolder) -> None:
    first = CurveFile(run, resumed_step=3)  # without earlier curves
    file = run.path / "metrics.csv"
    for step in (5, 12, 15, 20):
        first.log_metrics({"train/loss": step / 4, "train/top5": 0.5}, step)
    first.log_metrics({"test/loss": 0.5}, 12)
    with file.open("a") as opened:
        opened.write("0,1")  # a truncated row
    rows = read_rows(file)
    resumed = CurveFile(run, resumed_step=12)
    assert read_rows(file) == rows  # nothing is dropped before the first new row
    resumed.log_metrics({"train/loss": 1.0}, 15)
    resumed.log_metrics({"train/loss": 0.5, "val/f1": 0.25}, 20)
    later = [{"step": "15", "train/loss": "1.0"}, {"step": "20", "train/loss": "0.5", "val/f1": "0.25"}]
    assert read_rows(file) == [*rows[:2], *later]
    assert header(run) == [*COLUMNS, "train/top5", "val/f1"]


@pytest.mark.parametrize("resumed_step", [12, None])
def test_a_kill_during_a_rewrite_leaves_the_earlier_curves_intact(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, resumed_step: int | None
) -> None:
    curves = CurveFile(run)
    curves.log_metrics({"train/loss": 1.5}, 12)
    before = (run.path / "metrics.csv").read_text()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        (CurveFile(run, resumed_step) if resumed_step else curves).log_metrics({"val/new": 1.0}, 13)
    assert (run.path / "metrics.csv").read_text() == before


def test_a_disk_error_is_named(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    curves = CurveFile(run)
    curves.log_metrics({"train/loss": 1.5}, 12)
    monkeypatch.setattr(loggers.csv.DictWriter, "writerow", full)
    with pytest.raises(Failure, match=r"No space left on device.*free some space, then start again"):
        curves.log_metrics({"train/loss": 1.0}, 13)


def read_events(run: RunFolder) -> EventAccumulator:
    events = EventAccumulator(str(run.path))
    events.Reload()
    return events


def test_the_hparams_of_a_run_are_those_of_its_net_and_features() -> None:
    model = {"net": "lenet", "optimizer_options": {"momentum": 0.9}, "schedule_options": None}
    features = {"weight_average": {"decay": 0.9}, "compile": {}, "resolutions": {"sides": {8: 0.5}}}
    data, trainer = {"dataset": "shapes", "batch_size": 32, "root": "home"}, {"max_epochs": 3, "devices": 2}
    settings = {"seed_everything": 5, "recipe": "small", "logs": "runs", "model": model, "data": data, **features}
    assert logged_settings({**settings, "trainer": trainer}) == {
        "recipe": "small", "seed": 5, "dataset": "shapes", "batch_size": 32, "max_epochs": 3, "model.net": "lenet",
        "model.optimizer_options": "{'momentum': 0.9}", "weight_average.decay": 0.9, "compile": "on",
        "resolutions.sides": "{8: 0.5}",
    }  # fmt: skip


def test_weights_from_before_the_first_step_are_named_as_such(run: RunFolder) -> None:
    run.test_weights("checkpoints/best.ckpt", {"epoch": 0, "global_step": 0})
    assert run.tested == {"checkpoint": "best.ckpt", "epoch": 0, "step": 0}
    assert weights_text({"tested": run.tested}) == "best, from before the first training step"


def test_tensorboard_drops_points_after_the_resumed_step(run: RunFolder) -> None:
    for resumed_step, points in ((None, {10: 10.0, 20: 20.0, 30: 30.0}), (20, {30: 99.0})):
        board = TensorBoardCurves(run, {"lr": 0.1}, resumed_step)
        for step, value in points.items():
            board.log_metrics({"val/loss": value}, step)
        board.save()
        board.finalize("success")
        if resumed_step is None:  # TensorBoard reads files in the order of their names, which begin with the second
            (first,) = run.path.glob("events.*")
            first.rename(first.with_name("events.out.tfevents.1000000000.host"))
    events = read_events(run).Scalars("val/loss")
    assert [(event.step, event.value) for event in events] == [(10, 10.0), (20, 20.0), (30, 99.0)]


def test_a_tracker_that_fails_is_left_out_and_the_training_continues(capsys: pytest.CaptureFixture[str]) -> None:
    class Failing(MLFlowLogger):
        def __init__(self) -> None:
            pass

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            raise ConnectionError("no server")

    trainer: Any = SimpleNamespace(loggers=[Failing()])
    log_values(trainer, {"val/loss": 1.0}, epoch=0, step=1)
    assert trainer.loggers == []
    assert "Failing failed (no server): the training continues without it" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_resumed_run_continues_its_tracked_run(name: str, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(name)
    for variable in [variable for variable in os.environ if variable.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", str(run.logs))  # has no login
    versions, other = [], {"another": "its id"}
    (run.path / "trackers.json").write_text(json.dumps(other))
    for _ in range(2):
        tracker = start_tracker(name, run, {"lr": 0.1})
        tracker.log_metrics({"train/loss": 1.0}, 3)
        tracker.finalize("success")
        tracker.log_metrics({"test/loss": 1.0}, 4)
        versions.append(tracker.version)
        if name == "wandb":
            tracker.experiment.finish()
    assert len(set(versions)) == 1 and json.loads((run.path / "trackers.json").read_text()) == {
        **other,
        name: versions[0],
    }


def test_unknown_loggers_and_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="wandb"):
        logger_names("wandbb")
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install -e"):
        logger_names("csv, mlflow")
