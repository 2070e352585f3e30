"""`cifar-lit export` on the command line: images of the check, output and invalid arguments."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from inference.small_nets import write_net
from PIL import ExifTags, Image

import cifar_lit
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


@pytest.mark.parametrize(("resize", "channels", "size"), [("crop", 3, 900), ("letterbox", 1, 120), ("squash", 3, 30)])
def test_the_printed_lines_give_a_turned_photo_the_probabilities_of_classify(
    working_folder: Path, capsys: pytest.CaptureFixture[str], resize: str, channels: int, size: int
) -> None:
    pytest.importorskip("onnxruntime")
    write_net(Path("run-1"), "lenet", channels, side=16, gain=3, resize=resize)
    export(["run-1", "--to", "onnx"])
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    photo = Image.effect_noise((7, 5), 200).resize((size, 2 * size), Image.Resampling.BICUBIC)
    photo.convert("RGB").save("cat.jpg", exif=exif)
    values: dict[str, Any] = {}
    exec(dedent(capsys.readouterr().out.partition("use it:")[2]), values)
    (expected,) = cifar_lit.load("run-1").predict("cat.jpg")
    printed = ast.literal_eval(capsys.readouterr().out)
    assert max(printed, key=printed.get) == expected.label
    classify_gives = sorted((probability for _, probability in expected.top), reverse=True)
    assert sorted(values["probabilities"][0], reverse=True)[:3] == pytest.approx(classify_gives, abs=1e-5)


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
