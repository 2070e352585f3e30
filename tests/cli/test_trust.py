"""Classes named in configuration files: harmless, typed on the command line, or allowed by --trust."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from contract.command_line import Answer, assert_refused, config_of, run_command

from cifar_lit.errors import UsageError
from cifar_lit.runs.config_file import MAX_BYTES, plain_text

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


def test_only_yaml_mappings_of_a_limited_size_are_accepted(tmp_path: Path) -> None:
    """tests/security has files that do more than set values."""
    large = ("a: " + "x" * MAX_BYTES, "larger than 32 KiB")
    for text, line in (large, ("- 1\n", "must hold settings by name"), ("a: [1", "not valid YAML at line 1")):
        (tmp_path / "own.yaml").write_text(text)
        with pytest.raises(UsageError, match=rf"own\.yaml.*{line}"):
            plain_text(tmp_path / "own.yaml")
    (tmp_path / "own.yaml").write_text("model: &m {lr: 0.1}\ndata: {<<: *m, count: 3}\n")
    assert plain_text(tmp_path / "own.yaml").startswith("model")
