"""`cifar-lit export` on the command line: images of the check, output and invalid arguments."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml
from contract.command_line import draw_folder
from inference.small_nets import write_net
from PIL import ExifTags, Image

import cifar_lit
from cifar_lit.base.errors import Failure, UsageError
from cifar_lit.cli.export import export
from cifar_lit.inference.model_file import load_model_file, save_weights


@pytest.fixture
def run(fitted_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run folder in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CIFAR_LIT_CACHE", str(tmp_path / "cache"))
    shutil.copytree(fitted_run, "runs/shapes-1")
    return Path("runs/shapes-1")


def draw_images(root: str, names: list[str], size: int = 16) -> Path:
    return draw_folder(Path(root), {f"{part}/{name}": 3 for part in ("train", "test") for name in names}, size)


def test_a_run_is_exported_and_checked_on_its_test_images(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export([str(run), "--to", "onnx", "--quantize", "int8", "--images", "50"])
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("calibrating on 360 training images of shapes") and err == ""
    assert lines[1] == "checking on 50 test images of shapes"
    assert "predicted classes agree on " in lines[2] and lines[3].endswith(" % of the file".replace(" %", "%"))
    assert lines[4].startswith(f"wrote {run}/model.int8.onnx · ") and (run / "model.int8.onnx").is_file()


@pytest.mark.parametrize(("resize", "channels", "size"), [("crop", 3, 900), ("letterbox", 1, 120), ("squash", 3, 30)])
def test_the_printed_lines_give_a_turned_photo_the_probabilities_of_classify(
    working_folder: Path, capsys: pytest.CaptureFixture[str], resize: str, channels: int, size: int
) -> None:
    pytest.importorskip("onnxruntime")
    write_net(Path("run-1"), "lenet", channels, side=16, gain=3, resize=resize)
    export(["run-1", "--to", "onnx", "--images", "2"])
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    photo = Image.effect_noise((7, 5), 200).resize((size, 2 * size), Image.Resampling.BICUBIC)
    photo.convert("RGB").save("cat.jpg", exif=exif)
    values: dict[str, Any] = {}
    exec(dedent(capsys.readouterr().out.partition("use it:")[2]), values)
    (expected,) = cifar_lit.load("run-1").predict("cat.jpg")
    assert capsys.readouterr().out.split() == [expected.label]
    classify_gives = sorted((probability for _, probability in expected.top), reverse=True)
    assert sorted(values["probabilities"][0], reverse=True)[:3] == pytest.approx(classify_gives, abs=1e-5)


def test_data_dir_gives_the_folder_of_moved_images(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "config.yaml").write_text(yaml.safe_dump({"data": {"dataset": "folder", "root": "gone"}}))
    net = load_model_file(run)
    card = replace(net.card, classes=sorted(net.classes))  # the order of folders
    save_weights(run / "model.safetensors", net.net.state_dict(), card)
    moved = draw_images("moved", card.classes)
    export([str(run), "--to", "torch-export", "--data-dir", str(moved)])
    assert capsys.readouterr().out.startswith("checking on 12 test images of folder moved\n")
    others, large = draw_images("others", ["cat", "dog"]), draw_images("large", card.classes, size=24)
    for root, text in (
        (others, "the data has other classes"),
        (large, "the images are 3×24×24, but the net takes 3×16×16"),
    ):
        with pytest.raises(Failure, match=text):
            export([str(run), "--to", "onnx", "--data-dir", str(root)])
    assert not list(run.glob("model.onnx*"))


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ("RUN --to onxx", "Did you mean onnx"),
        ("RUN --to onnx --quantize int4", "--quantize"),
        ("RUN --to torch-export --quantize int8", "with --to onnx"),
        ("RUN --to onnx --out RUN/model.safetensors", "is the model to export: name another file with --out FILE"),
        ("RUN --to onnx --images -1", "images"),
        ("RUN --to onnx --reject 0.9", "reject is a false-alarm rate"),
        ("runs/none --to onnx", "there is no runs/none"),
    ],
)
def test_invalid_arguments_are_refused_before_the_export(run: Path, argv: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        export(argv.replace("RUN", str(run)).split())
