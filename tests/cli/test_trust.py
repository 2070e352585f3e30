"""Configuration files set values; which classes they may name, and who says so."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from contract.command_line import Answer, assert_refused, config_of, run_command

from cifar_lit.errors import UsageError
from cifar_lit.runs.config_file import MAX_BYTES, plain_text

OWN = """from pathlib import Path
from lightning.pytorch.callbacks import Callback
Path("imported").touch()
class Own(Callback):
    def on_train_start(self, trainer, pl_module):
        Path("ran").touch()
"""


def refused(answer: Answer, name: str) -> None:
    assert_refused(answer, 2, f"a configuration file names {name}, whose code would run: leave it out, or give --trust")


@pytest.fixture
def own(working_folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The import path of a callback in the working folder; a module of its own for each test, as modules stay imported."""
    name = f"own_{abs(hash(request.node.name)) % 10**8}"
    (working_folder / f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(working_folder)
    (working_folder / "own.yaml").write_text(f"trainer:\n  max_epochs: 1\n  callbacks:\n  - class_path: {name}.Own\n")
    return f"{name}.Own"


def test_lightnings_harmless_classes_may_be_named_by_files_and_others_on_the_users_word_only(
    working_folder: Path,
) -> None:
    words = ("--recipe", "small.yaml", "--epochs", "1", "--config", "own.yaml")
    harmless = "class_path: lightning.pytorch.callbacks.LearningRateMonitor"
    stopping = "class_path: EarlyStopping, init_args: {monitor: val/loss}"
    (working_folder / "own.yaml").write_text(f"trainer: {{callbacks: [{{{harmless}}}, {{{stopping}}}]}}")
    assert run_command(*words).code == 0
    (working_folder / "own.yaml").write_text("trainer: {callbacks: [{class_path: LambdaCallback}]}")
    refused(run_command(*words), "lightning.pytorch.callbacks.LambdaCallback")
    assert run_command(*words[:4], "--trainer.callbacks=LambdaCallback").code == 0


def test_what_is_typed_is_trusted_and_its_run_is_tested_as_it_was_started(working_folder: Path, own: str) -> None:
    assert run_command("--recipe", "small.yaml", "--epochs", "1", f"--trainer.callbacks={own}").code == 0
    assert (working_folder / "ran").exists()
    checkpoint = "lightning_logs/small-1/checkpoints/last.ckpt"
    assert run_command("test", "--ckpt_path", checkpoint).code == 0
    path = working_folder / "lightning_logs/small-1/config.yaml"
    path.write_text(path.read_text() + "\n")  # another text than the one that the run wrote
    refused(run_command("test", "--ckpt_path", checkpoint), own)
    assert run_command("test", "--ckpt_path", checkpoint, "--trust").code == 0


def test_a_run_from_elsewhere_is_refused_with_foreign_classes_and_taken_without(
    working_folder: Path, run_dir: Path, own: str
) -> None:
    shutil.copytree(run_dir, working_folder / "copy")
    assert run_command("test", "--ckpt_path", "copy/checkpoints/best.ckpt").code == 0
    path = working_folder / "copy/config.yaml"
    assert config_of(working_folder / "copy")["trainer"]["callbacks"] is None
    path.write_text(path.read_text().replace("callbacks: null", f"callbacks: [{{class_path: {own}}}]"))
    (working_folder / "copy/metrics.json").unlink()
    for words in (["test", "--ckpt_path", "copy/checkpoints/best.ckpt"], ["--resume", "copy"]):
        refused(run_command(*words), own)
    assert not (working_folder / "imported").exists()


@pytest.mark.parametrize(
    "text", ["model: {net: own.Net}", "model.net: own.Net", "data:\n  dataset: own.Net", "model.net: own.py:Net"]
)
def test_a_net_or_data_set_of_ones_own_is_imported_only_if_typed_or_trusted(working_folder: Path, text: str) -> None:
    (working_folder / "own.yaml").write_text(text)
    name = text.rpartition(": ")[2].rstrip("}")
    group, key = ("data", "dataset") if "dataset" in text else ("model", "net")
    for argv in (["--config", "own.yaml"], ["--config", "own.yaml", "--model.net=other.Net"]):
        refused(run_command("--recipe", "small.yaml", *argv), name)
    for argv in (["--config", "own.yaml", "--trust"], ["--config", "own.yaml", f"--{group}.{key}", name]):
        assert "whose code would run" not in run_command("--recipe", "small.yaml", *argv).err
    (working_folder / "part.yaml").write_text(f"{key}: {name}")
    refused(run_command("--recipe", "small.yaml", f"--{group}=part.yaml"), name)


def test_files_that_hold_no_settings_by_name_are_refused_and_anchors_are_taken(tmp_path: Path) -> None:
    """Files that do more than set values are in tests/security."""
    for text, line in (
        ("a: " + "x" * MAX_BYTES, "larger than 32 KiB"), ("- 1\n", "must hold settings by name"),
        ("a: [1", "not valid YAML at line 1"),
    ):  # fmt: skip
        (tmp_path / "own.yaml").write_text(text)
        with pytest.raises(UsageError, match=rf"own\.yaml.*{line}"):
            plain_text(tmp_path / "own.yaml")
    (tmp_path / "own.yaml").write_text("model: &m {lr: 0.1}\ndata: {<<: *m, count: 3}\n")  # anchors within reason
    assert plain_text(tmp_path / "own.yaml").startswith("model")
