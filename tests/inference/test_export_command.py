"""`cifar-lit export` on the command line: images of the check, output and invalid arguments."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cifar_lit.base.errors import UsageError
from cifar_lit.cli.export import export


@pytest.fixture
def run(fitted_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run folder in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CIFAR_LIT_CACHE", str(tmp_path / "cache"))
    shutil.copytree(fitted_run, "runs/shapes-1")
    return Path("runs/shapes-1")


def test_a_run_is_exported_beside_its_weights(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export([str(run), "--to", "torch-export"])
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("checked on 64 generated images · largest difference of a probability ") and err == ""
    assert lines[1].startswith(f"wrote {run}/model.pt2 · ") and (run / "model.pt2").is_file()


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ("RUN --to onxx", "Did you mean onnx"),
        ("RUN --to onnx --out RUN/model.safetensors", "is the model to export: name another file with --out FILE"),
        ("runs/none --to onnx", "there is no runs/none"),
    ],
)
def test_invalid_arguments_are_refused_before_the_export(run: Path, argv: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        export(argv.replace("RUN", str(run)).split())
