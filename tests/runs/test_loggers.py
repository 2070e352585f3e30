import csv
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from cifar_lit.runs.loggers import COLUMNS, CurveFile, TensorBoardCurves
from cifar_lit.runs.run_folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder(tmp_path / "logs", "fast")
    yield folder
    folder.release()


def rows(run: RunFolder) -> list[dict[str, str]]:
    with (run.path / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_each_moment_of_logging_is_a_row_with_gaps_where_nothing_was_taken(run: RunFolder) -> None:
    curves = CurveFile(run)
    curves.log_metrics({"train/loss": 2.5, "lr": 0.1, "epoch": 0}, 50)
    curves.log_metrics({"val/loss": 2.25, "val/accuracy": 0.125, "epoch": 0, "something else": 1.0}, 60)
    first, second = rows(run)
    assert tuple(first) == COLUMNS
    assert {name: value for name, value in first.items() if value} == {
        "epoch": "0",
        "step": "50",
        "lr": "0.1",
        "train/loss": "2.5",
    }
    assert {name: value for name, value in second.items() if value} == {
        "epoch": "0", "step": "60", "val/loss": "2.25", "val/accuracy": "0.125",
    }  # fmt: skip


def test_a_resumed_run_keeps_its_rows_and_drops_those_after_the_checkpoint(run: RunFolder) -> None:
    first = CurveFile(run)
    for step in (5, 10, 15, 20):
        first.log_metrics({"train/loss": step / 7}, step)
    kept = rows(run)[:2]
    resumed = CurveFile(run, resumed_step=12)
    assert len(rows(run)) == 4  # nothing is dropped before there is something new
    resumed.log_metrics({"train/loss": 1.0}, 15)
    resumed.log_metrics({"train/loss": 0.5}, 20)
    found = rows(run)
    assert found[:2] == kept
    assert [(row["step"], row["train/loss"]) for row in found[2:]] == [("15", "1.0"), ("20", "0.5")]


def test_rows_of_the_resumed_step_itself_stay(run: RunFolder) -> None:
    CurveFile(run).log_metrics({"val/loss": 1.5}, 12)
    CurveFile(run, resumed_step=12).log_metrics({"train/loss": 1.0}, 13)
    assert [row["step"] for row in rows(run)] == ["12", "13"]


def test_what_a_kill_cut_short_and_the_rows_of_a_test_that_is_made_again_go(run: RunFolder) -> None:
    curves = CurveFile(run)
    curves.log_metrics({"train/loss": 1.5}, 12)
    curves.log_metrics({"test/loss": 0.5, "test/accuracy": 0.75}, 12)
    with (run.path / "metrics.csv").open("a") as file:
        file.write("0,1")  # of step 13
    CurveFile(run, resumed_step=12).log_metrics({"train/loss": 1.0}, 13)
    assert [(row["step"], row["train/loss"]) for row in rows(run)] == [("12", "1.5"), ("13", "1.0")]


def test_a_kill_while_a_resumed_run_takes_its_curves_up_leaves_them_whole(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    CurveFile(run).log_metrics({"train/loss": 1.5}, 12)
    before = (run.path / "metrics.csv").read_text()
    monkeypatch.setattr(Path, "replace", _killed)
    with pytest.raises(KeyboardInterrupt):
        CurveFile(run, resumed_step=12).log_metrics({"train/loss": 1.0}, 13)
    assert (run.path / "metrics.csv").read_text() == before


def _killed(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_resumed_run_without_earlier_curves_starts_them(run: RunFolder) -> None:
    CurveFile(run, resumed_step=12).log_metrics({"train/loss": 1.0}, 13)
    assert [row["step"] for row in rows(run)] == ["13"]


def test_curves_claim_the_folder_only_when_there_is_something_to_write(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "logs", "fast")
    curves = CurveFile(folder)
    assert not (tmp_path / "logs").exists()
    curves.log_metrics({"lr": 0.1}, 1)
    assert (tmp_path / "logs" / "fast-1" / "metrics.csv").is_file()
    folder.release()


def read_events(run: RunFolder) -> EventAccumulator:
    events = EventAccumulator(str(run.path))
    events.Reload()
    return events


def test_tensorboard_gets_scalars_hparams_and_images_straight_in_the_run_folder(run: RunFolder) -> None:
    board = TensorBoardCurves(run, {"lr": 0.1, "net": "lenet", "recipe": "fast"})
    board.log_hyperparams({})
    board.log_metrics({"train/loss": 2.5, "lr": 0.1, "epoch": 0}, 50)
    board.log_metrics({"train/loss": 2.0, "epoch": 1}, 100)
    board.log_images("images/train", torch.zeros(3, 8, 8, dtype=torch.uint8))
    board.log_hyperparams({})
    board.save()
    events = read_events(run)
    assert set(events.Tags()["scalars"]) == {"train/loss", "lr"}
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(50, 2.5), (100, 2.0)]
    assert events.Tags()["images"] == ["images/train"]
    plugin = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert all(text in plugin for text in (b"lenet", b"recipe", b"lr"))
    assert [file.name.split(".")[0] for file in run.path.iterdir() if not file.name.startswith(".")] == ["events"]


def test_tensorboard_forgets_what_came_after_the_resumed_step(run: RunFolder) -> None:
    before = TensorBoardCurves(run, {})
    for step in (10, 20, 30):
        before.log_metrics({"train/loss": float(step)}, step)
    before.save()
    run.release()
    resumed = RunFolder(run.logs, "fast", run.path)
    after = TensorBoardCurves(resumed, {"lr": 0.1}, resumed_step=20)
    after.log_hyperparams({})
    after.log_metrics({"train/loss": 99.0}, 30)
    after.save()
    events = read_events(resumed)
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(10, 10.0), (20, 20.0), (30, 99.0)]
    resumed.release()
