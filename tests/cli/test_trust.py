"""Classes named in configuration files: harmless, typed on the command line, or allowed by --trust."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from contract.command_line import Answer, assert_refused, config_of, run_command

from cifar_lit.errors import UsageError
from cifar_lit.runs.config_file import MAX_BYTES, plain_values

CALLBACK = """from pathlib import Path
from lightning.pytorch.callbacks import Callback
Path("imported").touch()
class Own(Callback):
    def on_train_start(self, trainer, pl_module):
        Path("ran").touch()
"""


def assert_class_refused(answer: Answer, name: str) -> None:
    assert_refused(answer, 2, f"a configuration file names {name}, whose code would run: leave it out, or give --trust")


@pytest.fixture
def own(working_folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Return the import path of a callback. Modules stay imported, so each test has its own."""
    name = f"own_{abs(hash(request.node.name)) % 10**8}"
    (working_folder / f"{name}.py").write_text(CALLBACK)
    monkeypatch.syspath_prepend(working_folder)
    (working_folder / "own.yaml").write_text(f"trainer:\n  max_epochs: 1\n  callbacks:\n  - class_path: {name}.Own\n")
    return f"{name}.Own"


def test_a_file_may_name_harmless_classes_of_lightning_but_no_others(working_folder: Path) -> None:
    words = ("--recipe", "small.yaml", "--epochs", "1", "--config", "own.yaml")
    harmless = "class_path: lightning.pytorch.callbacks.LearningRateMonitor"
    stopping = "class_path: EarlyStopping, init_args: {monitor: val/loss}"
    (working_folder / "own.yaml").write_text(f"trainer: {{callbacks: [{{{harmless}}}, {{{stopping}}}]}}")
    assert run_command(*words).code == 0
    (working_folder / "own.yaml").write_text("trainer: {callbacks: [{class_path: LambdaCallback}]}")
    assert_class_refused(run_command(*words), "lightning.pytorch.callbacks.LambdaCallback")
    assert run_command(*words[:4], "--trainer.callbacks=LambdaCallback").code == 0


def test_a_typed_class_is_trusted_as_long_as_the_config_of_its_run_is_unchanged(working_folder: Path, own: str) -> None:
    assert run_command("--recipe", "small.yaml", "--epochs", "1", f"--trainer.callbacks={own}").code == 0
    assert (working_folder / "ran").exists()
    checkpoint = "lightning_logs/small-1/checkpoints/last.ckpt"
    assert run_command("test", "--ckpt_path", checkpoint).code == 0
    path = working_folder / "lightning_logs/small-1/config.yaml"
    path.write_text(path.read_text() + "\n")  # no longer the text written by the run
    assert_class_refused(run_command("test", "--ckpt_path", checkpoint), own)
    assert run_command("test", "--ckpt_path", checkpoint, "--trust").code == 0


def test_a_copied_run_is_refused_only_if_it_names_classes(working_folder: Path, run_dir: Path, own: str) -> None:
    shutil.copytree(run_dir, working_folder / "copy")
    assert run_command("test", "--ckpt_path", "copy/checkpoints/best.ckpt").code == 0
    path = working_folder / "copy/config.yaml"
    assert config_of(working_folder / "copy")["trainer"]["callbacks"] is None
    path.write_text(path.read_text().replace("callbacks: null", f"callbacks: [{{class_path: {own}}}]"))
    (working_folder / "copy/metrics.json").unlink()
    for words in (["test", "--ckpt_path", "copy/checkpoints/best.ckpt"], ["--resume", "copy"]):
        assert_class_refused(run_command(*words), own)
    assert not (working_folder / "imported").exists()


@pytest.mark.parametrize(
    "text",
    [
        "model: {net: own.Net}",
        "model.net: own.Net",
        "data:\n  dataset: own.Net",
        "model.net: own.py:Net",
        "model.schedule: own.Net",
    ],
)
def test_a_custom_net_or_data_set_is_imported_only_if_typed_or_trusted(working_folder: Path, text: str) -> None:
    (working_folder / "own.yaml").write_text(text)
    name = text.rpartition(": ")[2].rstrip("}")
    group, key = ("data", "dataset") if "dataset" in text else ("model", "schedule" if "schedule" in text else "net")
    for argv in (["--config", "own.yaml"], ["--config", "own.yaml", f"--{group}.{key}=other.Net"]):
        assert_class_refused(run_command("--recipe", "small.yaml", *argv), name)
    for argv in (["--config", "own.yaml", "--trust"], ["--config", "own.yaml", f"--{group}.{key}", name]):
        assert "whose code would run" not in run_command("--recipe", "small.yaml", *argv).err
    (working_folder / "part.yaml").write_text(f"{key}: {name}")
    assert_class_refused(run_command("--recipe", "small.yaml", f"--{group}=part.yaml"), name)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("'[{class_path: own.Net}]'", "a text that would be read as a list or as settings"),
        ("'{class_path: own.Net}'", "a text that would be read as a list or as settings"),
        ("|\n    class_path: own.Net\n", "a text that would be read as a list or as settings"),
        ('"\\n- class_path: own.Net"', "a text that would be read as a list or as settings"),
        ("'[&a [x, x], *a, *a]'", "a text that would be read as a list or as settings"),
        ("'99999999999999999999'", "an integer of more than 64 bits"),
        (f"'{'[' * 5000}'", "a text of more than 4,096 characters"),
        ('"a\\0b"', "invalid Unicode or a NUL character"),
        ('"a\\ud800b"', "invalid Unicode or a NUL character"),
    ],
    ids=range(9),
)
def test_a_text_in_a_file_is_not_parsed_a_second_time(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "own.yaml").write_text(f"trainer:\n  strategy: auto\n  callbacks: {text}")
    with pytest.raises(UsageError, match=rf"own\.yaml was not read: it has {fault} at line 3"):
        plain_values(tmp_path / "own.yaml")


def test_names_with_brackets_and_colons_are_text(tmp_path: Path) -> None:
    texts = [
        "{epoch}",
        "{epoch:02d}-{val/loss:.2f}",
        "D:",
        "http://host:8080/a",
        "[a] b",
        "[old/a b]",
        "9" * 18,
        "1e-3",
    ]
    (tmp_path / "own.yaml").write_text(json.dumps({"a": texts}))
    assert plain_values(tmp_path / "own.yaml") == {"a": texts}


def test_settings_in_quotes_are_refused_in_every_file_of_a_command(
    working_folder: Path, run_dir: Path, own: str
) -> None:
    shutil.copytree(run_dir, working_folder / "copy")
    (working_folder / "copy/metrics.json").unlink()
    config = (working_folder / "copy/config.yaml").read_text()
    (working_folder / "copy/config.yaml").write_text(config.replace("callbacks: null", f"callbacks: '[{own}]'"))
    (working_folder / "own.yaml").write_text(f"trainer: {{callbacks: '[{{class_path: {own}}}]'}}")
    for words in (
        ["--recipe", "own.yaml"],
        ["--recipe", "small.yaml", "--config", "own.yaml", "--trust"],
        ["--recipe", "small.yaml", "--trainer=own.yaml"],
        ["--resume", "copy"],
        ["test", "--ckpt_path", "copy/checkpoints/best.ckpt"],
    ):
        assert_refused(run_command(*words), 2, "a text that would be read as a list or as settings")
    assert not (working_folder / "imported").exists()


def test_the_parser_does_not_read_a_file_that_is_called_like_a_configuration(working_folder: Path) -> None:
    (working_folder / "own.yaml").write_text("seed_everything: 5")
    (working_folder / "\n{seed_everything: 5}\n").write_text("model: {lr: 7.0}")
    (working_folder / "seed_everything: 5").write_text("model: {lr: 7.0}")
    answer = run_command("fit", "--recipe", "small.yaml", "--config", "own.yaml", "--print_config")
    settings = yaml.safe_load(answer.out)
    assert (settings["seed_everything"], settings["model"]["lr"]) == (5, 0.05)


def test_variables_of_the_environment_are_not_settings(working_folder: Path) -> None:
    variables = {"PL_FIT__MODEL__LR": "7.0", "PL_FIT__CONFIG": "nowhere.yaml", "PL_CONFIG": "nowhere.yaml"}
    answer = run_command("fit", "--recipe", "small.yaml", "--print_config", **variables)
    assert yaml.safe_load(answer.out)["model"]["lr"] == 0.05


@pytest.mark.parametrize("flag", ["--seeds=0-1", "--folds=2"])
def test_a_file_does_not_choose_a_folder_elsewhere_for_several_trainings(working_folder: Path, flag: str) -> None:
    elsewhere = working_folder.parent / f"elsewhere{flag}"
    (working_folder / "own.yaml").write_text(f"logs: {elsewhere}")
    words = ("train", "--recipe", "small.yaml", "--config", "own.yaml", flag)
    answer = run_command(*words)
    assert answer.code == 2 and "sets logs to" in answer.err and "which no file may choose" in answer.err
    assert not elsewhere.exists()
    answer = run_command(*words, "--trust", "--model.net=none")  # goes on to the next fault
    assert answer.code == 2 and "which no file may choose" not in answer.err


def test_only_yaml_mappings_of_a_limited_size_are_accepted(tmp_path: Path) -> None:
    """tests/security has files that do more than set values."""
    large = ("a: " + "x" * MAX_BYTES, "larger than 32 KiB")
    for text, line in (large, ("- 1\n", "must hold settings by name"), ("a: [1", "not valid YAML at line 1")):
        (tmp_path / "own.yaml").write_text(text)
        with pytest.raises(UsageError, match=rf"own\.yaml.*{line}"):
            plain_values(tmp_path / "own.yaml")
    (tmp_path / "own.yaml").write_text("model: &m {lr: 0.1}\ndata: {<<: *m, count: 3}\n")
    assert plain_values(tmp_path / "own.yaml")["data"] == {"lr": 0.1, "count": 3}
