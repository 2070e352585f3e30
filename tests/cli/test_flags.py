"""What is read from a command line before its parser, and the files with lower precedence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cifar_lit.base import hardware
from cifar_lit.base.errors import UsageError
from cifar_lit.base.hardware import Machine
from cifar_lit.cli.flags import Command, machine_kind, parse
from cifar_lit.cli.settings_parser import parse_settings


def settings_of(*words: str) -> Any:
    """Return the settings of a training with these flags."""
    return parse_settings(parse("fit", list(words)), None)[1]


@pytest.mark.parametrize(
    ("recipe", "config", "flags", "kept"),
    [
        ("optimizer_options: {momentum: 0.9}", "lr: 1", "", True),  # without a name they are of the default, sgd
        ("optimizer_options: {momentum: 0.9}", "lr: 1", "--model.optimizer sgd", True),
        ("optimizer_options: {momentum: 0.9}", "lr: 1", "--model.optimizer adamw", False),
        ("optimizer: muon, optimizer_options: {momentum: 0.9}", "lr: 1", "", True),
        ("optimizer: muon, optimizer_options: {momentum: 0.9}", "optimizer: sgd", "", False),
        ("optimizer: muon", "optimizer_options: {momentum: 0.9}", "", True),
        ("optimizer: muon", "optimizer_options: {momentum: 0.9}", "--model.optimizer adamw", False),
    ],
)
def test_options_are_dropped_with_the_optimizer_that_they_are_for(
    recipe: str, config: str, flags: str, kept: bool, working_folder: Path
) -> None:
    (working_folder / "small.yaml").write_text(f"model: {{{recipe}}}")
    (working_folder / "a.yaml").write_text(f"model: {{{config}}}")
    settings = settings_of("--recipe", "small.yaml", "--config", "a.yaml", *flags.split())
    assert (settings.model.optimizer_options == {"momentum": 0.9}) == kept


@pytest.mark.parametrize(("written", "share"), [("true", 0.5), ("false", None), ("{share: 0.3}", 0.3)])
def test_a_feature_is_turned_on_and_off_by_files_and_flags(
    written: str, share: float | None, working_folder: Path
) -> None:
    (working_folder / "a.yaml").write_text(f"skip_easy: {written}")
    for words in (["--config", "a.yaml"], ["--skip_easy", written]):
        skip = settings_of("--recipe", "quickstart", *words).skip_easy
        assert getattr(skip, "share", None) == share


def test_a_typed_setting_that_the_data_set_does_not_use_is_refused() -> None:
    for flag, users in (("--data.count", "shapes"), ("--data.images.resize", "folder")):
        with pytest.raises(UsageError, match=f"is for {users}, and cifar10 does not use it: leave it out"):
            settings_of("--recipe", "quickstart", "--dataset", "cifar10", flag, "3" if users == "shapes" else "squash")
    assert settings_of("--recipe", "quickstart", "--dataset", "cifar10").data.dataset == "cifar10"  # the recipe's count
    settings_of("--dataset", "cifar10", "--data.levels", "null")  # takes back what a recipe sets
    settings_of("--dataset", "my_data.photos", "--data.count", "5")  # a function may use all


def test_a_file_named_like_a_value_is_not_read_in_its_place(working_folder: Path) -> None:
    words = ("--accelerator", "cpu", "--precision", "32-true", "--net", "lenet", "--model.optimizer", "adamw")
    expected = settings_of("--recipe", "quickstart", *words)
    for name in ("auto", "quickstart", "shapes", *words[1::2]):
        (working_folder / name).write_text("hello")
    assert settings_of("--recipe", "quickstart", *words) == expected


def test_a_feature_without_a_value_is_turned_on() -> None:
    assert parse("fit", ["--class_weights", "--compile", "--lr", "1"]).flags == [
        "--class_weights={}",
        "--compile={}",
        "--model.lr=1",
    ]


def test_the_last_of_repeated_flags_wins() -> None:
    command = parse("fit", ["--lr=1", "--model.lr", "3"])
    assert command.value("model.lr") == "3"
    command = parse("fit", ["--recipe", "a", "--logs", "b", "--resume", "c", "--recipe=d", "--logs=e", "--resume=f"])
    assert (command.recipe, command.logs, command.resume, command.value("model.net")) == ("d", "e", "f", None)
    assert parse("fit", ["--resume", "c", "--resume"]).resume == ""


def test_resume_takes_an_optional_path_and_negative_numbers_are_values() -> None:
    for argv, resume in (("", None), ("--resume", ""), ("--resume a-1", "a-1"), ("--ckpt_path=a-1", "a-1")):
        command = parse("fit", [*argv.split(), "--lr", "-1e-3"])
        assert (command.resume, command.flags) == (resume, ["--model.lr=-1e-3"])


def test_switches_are_recognised_and_unknown_flags_are_left_to_the_parser() -> None:
    for name in ("validate", "test", "predict"):
        assert parse(name, ["--ckpt_path", "a.ckpt"]) == Command(name, flags=["--ckpt_path=a.ckpt"])
    assert parse("fit", ["--trust", "--debug"]) == Command("fit")
    for flag in ("--epoch", "--dev", "--batch", "--recip", "--conf", "--log", "--resum", "--trus"):
        assert parse("fit", [flag, "3"]) == Command("fit", flags=[f"{flag}=3"])
    for flag in ("--help-all", "--print_config", "--print_config=skip_default"):
        assert parse("fit", [flag]).asks_only
    assert not parse("fit", ["--a"]).asks_only


@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        (["--recipe", "--debug"], "--recipe needs a value"),
        (["--debug", "extra"], "unexpected argument 'extra'"),
        (["--model.lr", "1", "-3"], "unexpected argument '-3'"),
        (["quickstart"], "Did you mean --recipe quickstart?"),
        (["small.yaml"], "Did you mean --config small.yaml?"),
        (["--data-dir", "my", "photos"], 'Put a value with spaces into double quotes: "my photos"'),
    ],
)
def test_an_argument_without_a_flag_gets_a_suggestion(argv: list[str], remedy: str) -> None:
    with pytest.raises(UsageError, match=re.escape(remedy)):
        parse("fit", argv)


def test_the_default_recipe_is_for_the_accelerator_and_not_for_an_unused_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine("a CPU", 2, False, (("H200", 2**37),), gpu_bf16=True)
    monkeypatch.setattr(hardware, "detect_machine", lambda: machine)
    assert [machine_kind(), machine_kind("gpu"), machine_kind("cpu")] == ["gpu", "gpu", "cpu"]
