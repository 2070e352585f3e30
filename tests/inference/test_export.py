"""Exported files answer as the nets that they were made from, or are not kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor

from cifar_lit.data.shapes import shapes
from cifar_lit.errors import Failure
from cifar_lit.inference import export as module
from cifar_lit.inference.export import Check, Sample, check, check_request, export, latencies, refuse_disagreement
from cifar_lit.models.registry import NETS, build_net
from cifar_lit.runs.model_file import LoadedNet, ModelCard, load_model_file

CLASSES = ["cat", "dog", "œuf", "a, b"]
SMALL_WHITENED = {"widths": [8, 16], "depth": 2}
pytestmark = pytest.mark.usefixtures("no_timing")


def fresh(name: str, side: int, channels: int = 3, options: dict[str, Any] | None = None) -> LoadedNet:
    torch.manual_seed(0)
    net = build_net(name, channels=channels, image_size=side, num_classes=4, options=options)
    for buffer in net.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)  # as if the norms had seen images
    card = ModelCard(name, 1.0, [channels, side, side], CLASSES, [0.4] * channels, [0.2] * channels, options or {})
    return LoadedNet(net, card).eval()


def noise(count: int, *shape: int) -> Tensor:
    return torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def drawn(train: bool, count: int) -> Sample:
    images = shapes(train, image_size=16, num_classes=4, count=count)
    return Sample(images.images.permute(0, 3, 1, 2), images.labels)


@pytest.mark.parametrize(
    ("to", "name", "side", "channels", "options"),
    [
        *(("onnx", name, 16, 3, {}) for name in NETS if name not in ("whitened", "sjnet")),
        ("onnx", "whitened", 16, 1, SMALL_WHITENED),
        ("torch-export", "resnet18", 8, 3, {}),  # torchvision's
        ("torch-export", "whitened", 16, 3, SMALL_WHITENED),
        ("safetensors", "whitened", 16, 3, SMALL_WHITENED),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_net_answers_alike_from_its_file(
    to: str, name: str, side: int, channels: int, options: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    net = fresh(name, side, channels, options)
    images = noise(20, channels, side, side)
    exported = export(net, to, tmp_path / "net", Sample(images, None))
    assert exported.check.images == exported.check.agreeing == 20
    assert exported.check.difference < 1e-5
    torch.testing.assert_close(module.FORMATS[to].open(tmp_path / "net")(images), net(images).softmax(1), rtol=1e-4, atol=1e-5)
    assert [(file.name, file.stat().st_size) for file in tmp_path.iterdir()] == [("net", exported.size)]
    assert capfd.readouterr() == ("", "")
    if to == "safetensors":
        assert load_model_file(tmp_path / "net").card == net.card
    elif to == "torch-export":
        extra = {module.METADATA_FILE: ""}
        torch.export.load(tmp_path / "net", extra_files=extra)
        assert json.loads(extra[module.METADATA_FILE]) == module.metadata(net)


def test_an_onnx_file_says_what_it_takes_and_gives(tmp_path: Path) -> None:
    import onnxruntime

    export(fresh("lenet", 20, 1), "onnx", tmp_path / "a.onnx", Sample(noise(3, 1, 20, 20), None))
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx", providers=["CPUExecutionProvider"])
    (images,), (probabilities,) = session.get_inputs(), session.get_outputs()
    assert (images.name, images.type, images.shape) == ("images", "tensor(uint8)", ["batch", 1, 20, 20])
    assert (probabilities.name, probabilities.type, probabilities.shape) == ("probabilities", "tensor(float)", ["batch", 4])
    metadata = session.get_modelmeta().custom_metadata_map
    assert (metadata["format"], metadata["net"], metadata["channels"]) == (module.FORMAT, "lenet", "1")
    assert json.loads(metadata["classes"]) == CLASSES
    assert json.loads(metadata["image_size"]) == [20, 20]
    assert metadata["input"] == "images: uint8 (batch, 1, 20, 20), grey, 0 to 255, not normalised"
    assert str(Path(module.__file__).parent).encode() not in (tmp_path / "a.onnx").read_bytes()


# ---- int8


@pytest.fixture(scope="module")
def fitted_onnx(fitted_run: Path) -> onnx.ModelProto:
    return module.onnx_model(load_model_file(fitted_run))  # which takes seconds


@pytest.fixture
def fitted_net(fitted_run: Path, fitted_onnx: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch) -> LoadedNet:
    monkeypatch.setattr(module, "onnx_model", lambda net: fitted_onnx)
    return load_model_file(fitted_run)


def test_int8_is_smaller_and_decides_nearly_alike(fitted_net: LoadedNet, tmp_path: Path) -> None:
    sample = drawn(False, 200)
    int8 = export(fitted_net, "onnx", tmp_path / "int8.onnx", sample, drawn(True, 200).images)
    plain = export(fitted_net, "onnx", tmp_path / "float.onnx", sample)
    assert int8.check.agreement >= 0.95
    assert 0 < int8.check.difference > plain.check.difference
    assert int8.check.accuracy and plain.check.accuracy
    assert int8.check.accuracy[0] == plain.check.accuracy[0] == plain.check.accuracy[1] > 0.3
    assert int8.size < 0.55 * plain.size  # a quarter, and the names of nodes and classes
    metadata = {entry.key: entry.value for entry in onnx.load(tmp_path / "int8.onnx").metadata_props}
    assert metadata["format"] == module.FORMAT
    assert "calibrated on 200 training images" in metadata["quantized"]


def test_a_net_that_int8_changes_too_much_is_not_kept(fitted_net: LoadedNet, tmp_path: Path) -> None:
    dark = torch.zeros(64, 3, 16, 16, dtype=torch.uint8)  # ranges of black images cut off all others
    text = r"int8 changes too much of this net: \d+\.\d% of the decisions agree .*leave --quantize out"
    with pytest.raises(Failure, match=text):
        export(fitted_net, "onnx", tmp_path / "a.onnx", drawn(False, 100), dark)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("sizes", "quantised", "kept"),
    [((5, 90, 5), ["1"], ["0", "2"]), ((90, 6, 4), ["0", "1"], ["2"]), ((4, 90, 6), ["1", "2"], ["0"]), ((9,), ["0"], [])],
)
def test_small_layers_at_both_ends_stay_in_float(sizes: tuple[int, ...], quantised: list[str], kept: list[str]) -> None:
    names = [str(number) for number in range(len(sizes))]
    weights = [onnx.TensorProto(name=f"w{name}", dims=[size]) for name, size in zip(names, sizes, strict=True)]
    nodes = [onnx.helper.make_node("Gemm", [f"x{name}", f"w{name}"], [f"y{name}"], name=name) for name in names]
    nodes.insert(1, onnx.helper.make_node("Relu", ["y0"], ["x1"], name="relu"))
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "net", [], [], weights))
    assert module._layers(model) == (quantised, kept)


# ---- what is not kept


def test_a_file_that_answers_otherwise_is_removed_and_the_old_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("of before")
    safetensors, other = module.FORMATS["safetensors"], fresh("tudui", 16)
    other.net.load_state_dict({name: 2 * tensor for name, tensor in other.net.state_dict().items()})
    wrong = safetensors._replace(write=lambda net, path: safetensors.write(other, path))
    monkeypatch.setitem(module.FORMATS, "safetensors", wrong)
    with pytest.raises(Failure, match="does not answer as the net: a probability differs by 0"):
        export(fresh("tudui", 16), "safetensors", tmp_path / "a", Sample(noise(9, 3, 16, 16), None))
    assert [file.read_text() for file in tmp_path.iterdir()] == ["of before"]
    with pytest.raises(Failure, match=r"cannot write .*nowhere.*"):
        export(fresh("tudui", 16), "torch-export", tmp_path / "nowhere" / "a.pt2", Sample(noise(1, 3, 16, 16), None))


def test_the_check_sees_a_single_batch_size_that_comes_out_wrong() -> None:
    right = module.runner_of(fresh("tudui", 16))
    images = noise(30, 3, 16, 16)
    for size in (1, 7, 256):
        result = check(right, lambda batch, size=size: right(batch) + 0.5 * (len(batch) == size), images, None)
        assert result.difference == pytest.approx(0.5, abs=1e-5), size
    assert check(right, right, images, None) == Check(30, pytest.approx(0, abs=1e-6), 30, None)
    assert check(right, lambda batch: right(batch)[:, :3], images, None).difference == float("inf")
    assert check(right, lambda batch: right(batch) * float("nan"), images, None).difference == float("inf")


def test_the_check_counts_decisions_and_right_answers() -> None:
    before, after = torch.eye(4), torch.eye(4)[[1, 1, 2, 3]]
    images = torch.arange(4, dtype=torch.uint8).view(4, 1, 1, 1)
    runners = (lambda batch, table=table: table[batch.flatten().int()] for table in (before, after))
    assert check(*runners, images, torch.tensor([0, 1, 2, 0])) == Check(4, 1.0, 3, (0.75, 0.5))


@pytest.mark.parametrize(
    ("int8", "kept", "refused"),
    [
        (False, [(9e-5, 100, 0.9)], [(2e-4, 100, 0.9), (float("nan"), 100, None)]),
        (True, [(0.3, 95, 0.885), (0.3, 95, None)], [(0.3, 94, 0.9), (0.3, 99, 0.87), (float("inf"), 99, 0.9)]),
    ],
)
def test_the_limits_of_disagreement(int8: bool, kept: list[Any], refused: list[Any]) -> None:
    """Cases are (difference, agreeing, the file's accuracy where the net's is 0.9)."""
    for difference, agreeing, accuracy in kept:
        refuse_disagreement(Check(100, difference, agreeing, accuracy and (0.9, accuracy)), int8)
    for difference, agreeing, accuracy in refused:
        with pytest.raises(Failure, match="not kept"):
            refuse_disagreement(Check(100, difference, agreeing, accuracy and (0.9, accuracy)), int8)


def test_times_are_taken_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_TURNS", 3)
    order: list[int] = []
    runners = [lambda images, number=number: order.append(number) or images for number in (0, 1)]
    assert [len(times) for times in latencies(runners, noise(1, 1, 2, 2))] == [3, 3]
    assert order == [0, 1] * 4


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    check_request("torch-export", None)
    with pytest.raises(Failure, match=r"--to onnx needs onnx and onnxscript and onnxruntime, .*pip install .cifar-lit\[export\]"):
        check_request("onnx", None)
