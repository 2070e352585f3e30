"""What a training prints: the start card, and the last lines with table, result, time, folder and next commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from .command_line import Answer, metrics_of, run_command
from .conftest import Training


def result_line(answer: Answer) -> int:
    """Where the line with the test's result stands."""
    return next(number for number, line in enumerate(answer.lines) if line.startswith("test accuracy 0."))


def test_the_result_is_told_in_three_lines_that_agree_with_metrics_json(training: Training) -> None:
    metrics, at = metrics_of(training.run_dir), result_line(training.answer)
    test = metrics["test"]
    assert training.answer.lines[at : at + 3] == [
        f"test accuracy {test['accuracy']:.4f} · loss {test['loss']:.4f} · 40 images",
        f"trained in {metrics['train_seconds']:.1f} s · {metrics['images_per_second']:.0f} images/s",
        "run lightning_logs/small-1",
    ]


def test_a_table_of_the_accuracy_of_each_class_stands_before_the_result(training: Training) -> None:
    above = training.answer.lines[: result_line(training.answer)]
    for name, accuracy in metrics_of(training.run_dir)["test"]["per_class"].items():
        assert any(name in line and f"{accuracy:.4f}" in line for line in above), name


def test_the_next_commands_stand_at_the_end_and_name_the_run(training: Training) -> None:
    below = training.answer.lines[result_line(training.answer) + 3 :]
    assert any("tensorboard --logdir lightning_logs" in line for line in below)
    commands = [shlex.split(line) for line in below if line.strip().startswith("cifar-lit ")]
    assert {"report", "classify"} <= {command[1] for command in commands}
    assert all("lightning_logs/small-1" in command for command in commands)


def test_a_printed_next_command_works_as_it_stands(training: Training, monkeypatch) -> None:
    monkeypatch.chdir(training.run_dir.parents[1])
    (line,) = [line for line in training.answer.lines if line.strip().startswith("cifar-lit classify ")]
    words = [str(Path(__file__).parent / "none.png") if word == "PICTURES" else word for word in shlex.split(line)[1:]]
    answer = run_command(*words)
    assert answer.code == 1  # the run is found and taken, only the picture is none
    assert "none.png" in answer.out + answer.err


def test_the_start_card_names_data_net_device_precision_batch_and_run(training: Training) -> None:
    card = "\n".join(training.answer.lines[: result_line(training.answer)])
    for fact in ("shapes", "160", "40", "lenet", "cpu", "32-true", "lightning_logs/small-1"):
        assert re.search(rf"\b{re.escape(fact)}\b", card), fact


def test_a_training_that_goes_well_prints_nothing_on_stderr_and_no_control_characters(training: Training) -> None:
    assert training.answer.err == ""
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", training.answer.out)


def test_no_advert_or_warning_of_a_library_is_printed(training: Training) -> None:
    assert not re.search(r"warning|💡|GPU available|https?://", training.answer.out, re.IGNORECASE)
