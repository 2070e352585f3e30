"""Exported files predict the same as their nets, or are removed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch

from cifar_lit.base.errors import Failure
from cifar_lit.inference import export as module
from cifar_lit.inference.export import FORMATS, check, drawn_images, export
from cifar_lit.inference.model_file import LoadedNet, ModelCard
from cifar_lit.models.registry import build_net

CLASSES = ["cat", "dog", "œuf", "a, b"]
SMALL_WHITENED = {"widths": [8, 16], "depth": 2}


def fresh(
    name: str, side: tuple[int, int] = (16, 16), channels: int = 3, options: dict[str, Any] | None = None
) -> LoadedNet:
    torch.manual_seed(0)
    net = build_net(name, channels=channels, image_size=side, num_classes=4, options=options)
    for buffer in net.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)  # statistics of a trained norm
    shape, mean, std = [channels, *side], [0.4] * channels, [0.2] * channels
    card = ModelCard(name, 1.0, shape, CLASSES, mean, std, options or {}, temperature=0.25)
    return LoadedNet(net, card).eval()


def assert_describes(metadata: dict[str, str], net: LoadedNet) -> None:
    """Assert that metadata tell a program without cifar-lit how to use the file."""
    channels, height, width = net.card.input_shape
    assert metadata["net"] == net.card.net and metadata["format"] == module.FORMAT
    assert (json.loads(metadata["classes"]), json.loads(metadata["image_size"])) == (CLASSES, [height, width])
    assert metadata["resize"] == "crop" and "cropped to its centre" in metadata["preparation"]
    assert f"uint8 (batch, {channels}, {height}, {width}), {'grey' if channels == 1 else 'RGB'}" in metadata["input"]
    assert metadata["channels"] == str(channels) and "float32 (batch, 4)" in metadata["output"]
    assert ModelCard(**json.loads(metadata["card"])) == net.card


@pytest.mark.parametrize(
    ("to", "name", "side", "channels"),
    [
        ("onnx", "shapenet", (16, 24), 3),
        ("onnx", "whitened", (20, 20), 1),
        ("torch-export", "whitened", (16, 20), 3),
    ],
)
def test_an_exported_file_predicts_the_same_and_describes_its_input(
    to: str, name: str, side: tuple[int, int], channels: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    net = fresh(name, side, channels, SMALL_WHITENED if name == "whitened" else None)
    images, path = drawn_images((channels, *side)), tmp_path / "net"
    assert export(net, to, path) < 1e-5
    expected = (net(images) / 0.25).softmax(1)
    torch.testing.assert_close(FORMATS[to].open(path)(images), expected, rtol=1e-4, atol=1e-5)
    assert list(tmp_path.iterdir()) == [path]
    assert capfd.readouterr() == ("", "")
    if to == "torch-export":
        extra = {module.METADATA_FILE: ""}
        torch.export.load(path, extra_files=extra)
        assert_describes(json.loads(extra[module.METADATA_FILE]), net)
    else:
        assert onnx.load(path).ir_version == 9  # onnxruntime 1.17 and its web build read no later format
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        (inputs,), (probabilities,) = session.get_inputs(), session.get_outputs()
        shape = ["batch", channels, *side]
        assert (inputs.name, inputs.type, inputs.shape) == ("images", "tensor(uint8)", shape)
        assert (probabilities.name, probabilities.type) == ("probabilities", "tensor(float)")
        assert probabilities.shape == ["batch", 4]
        metadata = session.get_modelmeta().custom_metadata_map
        assert_describes(metadata, net)
        assert str(Path(module.__file__).parent).encode() not in path.read_bytes()


def test_the_metadata_has_height_before_width_and_the_levels_of_16_bits() -> None:
    card = ModelCard(
        "lenet", 1.0, [3, 16, 24], CLASSES, [0.5] * 3, [0.25] * 3, levels=[7000, 7366], thresholds=[0.25, 1]
    )
    metadata = module.metadata(LoadedNet(torch.nn.Identity(), card))
    assert json.loads(metadata["image_size"]) == [16, 24] and "uint8 (batch, 3, 16, 24)" in metadata["input"]
    assert metadata["preparation"].endswith(", 16-bit values from 7000 to 7366 scaled to 0 … 255")
    assert json.loads(metadata["card"])["levels"] == [7000, 7366]
    assert json.loads(metadata["thresholds"]) == [0.25, 1]


# ---- refused files


def test_a_wrong_file_is_removed_and_the_old_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("old")
    other, right = fresh("tudui"), FORMATS["torch-export"]
    other.net.load_state_dict({name: 2 * tensor for name, tensor in other.net.state_dict().items()})
    with pytest.raises(Failure, match=r"cannot write .*nowhere.*"):
        export(other, "torch-export", tmp_path / "nowhere" / "a.pt2")
    wrong = right._replace(write=lambda net, *args: right.write(other, *args))
    monkeypatch.setitem(FORMATS, "torch-export", wrong)
    with pytest.raises(Failure, match="the file differs from the net: a probability differs by 0"):
        export(fresh("tudui"), "torch-export", tmp_path / "a")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_the_check_finds_errors_at_one_batch_size_and_values_that_are_not_finite() -> None:
    run, images = module.runner_of(fresh("tudui")), drawn_images((3, 16, 16))
    for size in (1, 7, 64):
        with pytest.raises(Failure, match=r"a probability differs by 0\.5"):
            check(run, lambda batch, size=size: run(batch) + 0.5 * (len(batch) == size), images)
    with pytest.raises(Failure, match="a probability differs by inf"):
        check(run, lambda batch: run(batch) * float("nan"), images)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("to", ["onnx", "torch-export"])
def test_a_full_disk_raises_an_os_error_without_aborting_the_process(to: str) -> None:
    with pytest.raises(OSError, match="No space left on device"):
        FORMATS[to].write(fresh("lenet"), Path("/dev/full"))
