"""What every command does and writes."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from .command_line import SCRIPTS, SMALL, assert_refused, metrics_of, rows_of, run_command, run_process

TRAINER_COMMANDS = ("fit", "train", "validate", "test", "predict")
OTHERS = (
    "recipes",
    "devices",
    "export",
    "classify",
    "compare",
    "report",
    "review",
    "serve",
)
COMMANDS = (*TRAINER_COMMANDS, *OTHERS)


# ---- the programs


def test_the_console_script_python_m_and_the_scripts_are_one_program(working_folder: Path) -> None:
    version = run_process([sys.executable, "-m", "cifar_lit", "--version"], working_folder)
    assert version.code == 0
    assert re.fullmatch(r"cifar-lit \d+\.\d+.*\n", version.out)
    programs = [[sys.executable, SCRIPTS / name] for name in ("train.py", "test.py")]
    console_script = shutil.which("cifar-lit", path=str(Path(sys.executable).parent))
    if console_script:
        programs.append([console_script])
    for program in programs:
        assert run_process([*program, "--version"], working_folder) == version


def test_classify_py_runs_classify(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["classify.py", "nowhere-1", "cat.png"])
    with pytest.raises(SystemExit) as script:
        runpy.run_path(str(SCRIPTS / "classify.py"), run_name="__main__")
    command = run_command("classify", "nowhere-1", "cat.png")
    assert (script.value.code, capsys.readouterr().err) == (command.code, command.err)
    assert "nowhere-1" in command.err


def test_help_has_a_line_for_every_command_and_every_short_flag() -> None:
    answer = run_command("--help", default="fit")
    assert answer.code == 0
    assert len(answer.lines) <= 64 and max(map(len, answer.lines)) <= 80
    first = [line.split()[0] for line in answer.lines if line.startswith("  ")]
    flags = [word for word in first if word.startswith("--")]
    assert set(COMMANDS) == {*first} - {*flags}
    wanted = "recipe config devices accelerator nodes precision epochs logs checkpoint-every lr debug dataset data-dir"
    wanted += " batch-size net seed resume trust seeds folds weights logger threads help-all"
    assert {f"--{flag}" for flag in wanted.split()} <= {*flags}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_short_help(command: str) -> None:
    for words in (["--help"], ["--lr", "1", "-h"] if command in TRAINER_COMMANDS else ["-h"]):
        answer = run_command(command, *words)
        assert (answer.code, answer.err) == (0, "")
        assert 2 < len(answer.lines) < 60
    if command in TRAINER_COMMANDS:
        assert ("--resume [PATH]" in answer.out) == (command in ("fit", "train"))
        assert ("--ckpt_path PATH" in answer.out) == (command not in ("fit", "train"))


@pytest.mark.parametrize("command", ["train", "predict"])
def test_every_trainer_model_and_data_setting_is_listed_on_request(command: str) -> None:
    answer = run_command(command, "--help-all")
    assert (answer.code, answer.err) == (0, "")
    flags = ("data-dir", "trainer.max_epochs", "model.net", "model.lr", "data.dataset", "data.batch_size", "debug")
    for flag in flags:
        assert re.search(rf"^  --{flag} ", answer.out, re.MULTILINE), flag


# ---- fit, train, validate, test, predict


def test_fit_does_not_test_and_prints_the_command_that_does() -> None:
    answer = run_command("fit", *SMALL, "--epochs", "1")
    assert (answer.code, answer.err) == (0, "")
    metrics = metrics_of(Path("lightning_logs/small-1"))
    assert metrics["test"] is None
    assert f"{metrics['val']['accuracy']:.4f}" in answer.out
    assert "test accuracy" not in answer.out
    (command,) = (line.split("cifar-lit ")[1] for line in answer.lines if "cifar-lit test " in line)
    assert run_command(*command.split()).code == 0
    assert metrics_of(Path("lightning_logs/small-2"))["test"]["images"] == 40


def test_a_printed_configuration_can_be_trained() -> None:
    printed = run_command("fit", *SMALL, "--print_config")
    assert printed.code == 0
    assert not Path("lightning_logs").exists()
    Path("own.yaml").write_text(printed.out)
    answer = run_command("fit", "--config", "own.yaml", "--trainer.fast_dev_run", "true")
    assert (answer.code, answer.err) == (0, "")


def test_predict_repeats_the_predictions_of_train(run_dir: Path) -> None:
    answer = run_command("predict", "--ckpt_path", run_dir / "checkpoints/best.ckpt")
    assert (answer.code, answer.err) == (0, "")
    assert "lightning_logs/small-1" in answer.out
    predicted, tested = (rows_of(run / "predictions.csv") for run in (Path("lightning_logs/small-1"), run_dir))
    for name in ("index", "label", "predicted"):
        assert [row[name] for row in predicted] == [row[name] for row in tested]


def test_validate_without_validation_images_is_refused(run_dir: Path) -> None:
    answer = run_command("validate", "--ckpt_path", run_dir / "checkpoints/best.ckpt", "--data.val_size", "0")
    assert_refused(answer, 2, "nothing to validate on", "val_size")


# ---- recipes, devices
