"""What a training prints: the last lines with table, result, time, folder and next commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from .command_line import Training, metrics_of, run_command


def test_the_last_lines_are_a_table_of_classes_the_result_the_folder_and_the_next_commands(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, metrics = training.answer.lines, metrics_of(training.run_dir)
    test = metrics["test"]
    at = next(number for number, line in enumerate(lines) if line.startswith("test accuracy 0."))
    assert lines[at : at + 3] == [
        f"test accuracy {test['accuracy']:.4f} · loss {test['loss']:.4f} · 40 images",
        f"trained in {metrics['train_seconds']:.1f} s · {metrics['images_per_second']:.0f} images/s",
        "run lightning_logs/small-1",
    ]
    for name, accuracy in test["per_class"].items():
        assert any(name in line and f"{accuracy:.4f}" in line for line in lines[:at]), name
    assert any("tensorboard --logdir lightning_logs" in line for line in lines[at:])
    commands = {line.split()[1]: shlex.split(line)[1:] for line in lines[at:] if line.strip().startswith("cifar-lit ")}
    assert {"report", "classify"} <= commands.keys()
    assert all("lightning_logs/small-1" in command for command in commands.values())

    monkeypatch.chdir(training.run_dir.parents[1])
    words = [str(Path(__file__).parent / "none.png") if word == "IMAGES" else word for word in commands["classify"]]
    answer = run_command(*words)
    assert answer.code == 1  # the run is taken, only the picture is none
    assert "none.png" in answer.out + answer.err


def test_nothing_is_printed_on_stderr_and_no_control_character(training: Training) -> None:
    assert training.answer.err == ""
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", training.answer.out)
