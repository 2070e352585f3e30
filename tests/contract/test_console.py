"""The output of a training; its last lines are the table, the result, the time, the folder and next commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from .command_line import Training, metrics_of, run_command


def test_the_last_lines_are_a_table_of_classes_the_result_the_run_folder_and_next_commands(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = metrics_of(training.run_dir)
    test = metrics["test"]
    lines = training.answer.lines
    start = next(number for number, line in enumerate(lines) if line.startswith("test accuracy 0."))
    table, result = lines[:start], lines[start:]
    assert result[:3] == [
        f"test accuracy {test['accuracy']:.4f} · loss {test['loss']:.4f} · 40 images",
        f"trained in {metrics['train_seconds']:.1f} s · {metrics['images_per_second']:.0f} images/s",
        "run lightning_logs/small-1",
    ]
    for name, accuracy in test["per_class"].items():
        assert any(name in line and f"{accuracy:.4f}" in line for line in table), name
    assert (len(result), result[3].split()[0]) == (5, "next:")
    commands = {}
    for line in result[3:]:
        words = shlex.split(line.removeprefix("next:"))
        commands[words[1]] = words[1:]
    assert {"report", "classify"} == commands.keys()
    assert all("lightning_logs/small-1" in command for command in commands.values())

    monkeypatch.chdir(training.run_dir.parents[1])
    words = [str(Path(__file__).parent / "none.png") if word == "IMAGES" else word for word in commands["classify"]]
    answer = run_command(*words)
    assert answer.code == 1  # the run is found, only the image is missing
    assert "none.png" in answer.out + answer.err


def test_stderr_is_empty_and_stdout_has_no_control_characters(training: Training) -> None:
    assert training.answer.err == ""
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", training.answer.out)
