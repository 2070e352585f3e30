"""`cifar-lit test RUN`: the stored weights are tested again, and what differs from the record is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from contract.command_line import Answer, assert_refused, metrics_of, run_command, table_rows


@pytest.fixture
def own(run_dir: Path) -> Path:
    """Return a copy of the run in the working folder."""
    return Path(shutil.copytree(run_dir, "own-1"))


def change_metrics(run: Path, part: str, **values: object) -> None:
    metrics = metrics_of(run)
    metrics[part] |= values
    (run / "metrics.json").write_text(json.dumps(metrics))


def assert_differs(answer: Answer, *lines: str) -> None:
    assert answer.code == 1, answer.err
    assert tuple(answer.lines[-len(lines) :]) == lines


def test_a_run_agrees_with_its_record(own: Path) -> None:
    answer = run_command("test", own, "--accelerator", "cpu")
    assert answer.code == 0, answer.err
    assert answer.lines[-1] == "data, predictions and accuracy agree with what the run recorded"
    test = metrics_of(own)["test"]
    rows = {name: recorded for name, recorded, _ in table_rows(answer.out)}
    assert rows["accuracy"] == f"{test['accuracy']:.4f}" and rows["loss"] == f"{test['loss']:.4f}"
    assert not Path("lightning_logs").exists()


def test_a_higher_accuracy_in_the_record_is_named(own: Path) -> None:
    now = metrics_of(own)["test"]["accuracy"]
    change_metrics(own, "test", accuracy=now + 0.1)
    claim = f"metrics.json has accuracy {now + 0.1:.4f}"
    line = f"{claim}, probabilities.npy has {now:.4f}"
    assert_differs(run_command("test", own, "--accelerator", "cpu"), line)


def test_changed_predictions_are_named(own: Path) -> None:
    array = np.load(own / "probabilities.npy")
    array[0] = np.eye(4)[array[0].argmin()]
    np.save(own / "probabilities.npy", array)
    answer = run_command("test", own, "--accelerator", "cpu")
    assert answer.code == 1
    assert "1 of 40 predictions in probabilities.npy are not those of model.safetensors" in answer.lines


@pytest.mark.parametrize(
    ("part", "name", "line"),
    [
        ("test", "fingerprint", "the run was tested on other images than these data have"),
        ("data", "images", "the run used other images than these data have (160 training images then, 160 now)"),
        ("data", "split", "the run used another split than these data have (160 training images then, 160 now)"),
    ],
)
def test_other_data_are_named(own: Path, part: str, name: str, line: str) -> None:
    change_metrics(own, part, **{name: "0" * 64})
    assert_differs(run_command("test", own, "--accelerator", "cpu"), line)


def test_what_is_no_tested_run_is_refused(own: Path) -> None:
    assert_refused(run_command("test", "none"), 2, "there is no none: name the folder of a finished run")
    assert_refused(run_command("test", own / "checkpoints/best.ckpt"), 2, "name the finished run own-1 instead")
    (own / "metrics.json").write_text("{}")
    assert_refused(run_command("test", own), 2, "own-1 has no test results to compare with")
