"""Exported files answer as the nets that they were made from, or are not kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from fitted import fitted_run
from torch import Tensor

from cifar_lit.data.shapes import shapes
from cifar_lit.errors import Failure, UsageError
from cifar_lit.inference import export as export_module
from cifar_lit.inference.export import (
    FORMAT,
    FORMATS,
    METADATA_FILE,
    Check,
    Sample,
    check,
    check_request,
    default_path,
    export,
    latencies,
    onnx_model,
    open_onnx,
    refuse_disagreement,
    runner_of,
)
from cifar_lit.models.registry import NETS, build_net
from cifar_lit.runs.model_file import LoadedNet, ModelCard, load_model_file

torch.set_num_threads(1)
CLASSES = ["cat", "dog", "œuf", "a, b"]


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


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose net decides with confidence; to be left as it is."""
    return fitted_run(tmp_path_factory.mktemp("export") / "shapes-1")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are not what is tested here."""
    monkeypatch.setattr(
        "cifar_lit.inference.export.latencies", lambda runners, images: latencies(runners, images, 0, min_turns=1)
    )


@pytest.mark.parametrize(
    ("name", "side", "channels", "options"),
    [
        *((name, 16, 3, {}) for name in NETS if name not in ("whitened", "sjnet")),
        ("whitened", 16, 1, {"widths": [8, 16], "depth": 2}),
        ("resnet18", 8, 3, {}),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_every_net_answers_alike_from_an_onnx_file(
    name: str, side: int, channels: int, options: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    net = fresh(name, side, channels, options)
    images = noise(20, channels, side, side)
    done = export(net, "onnx", tmp_path / "net.onnx", Sample(images, None))
    assert done.check.images == done.check.agreeing == 20
    assert done.check.difference < 1e-5
    assert done.size == (tmp_path / "net.onnx").stat().st_size
    expected = net(images).softmax(1)
    torch.testing.assert_close(open_onnx(done.path)(images), expected, rtol=1e-4, atol=1e-5)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("to", ["torch-export", "safetensors"])
@pytest.mark.parametrize(("name", "options"), [("tudui", {}), ("whitened", {"widths": [8, 16]})])
def test_the_other_formats_answer_alike_too(
    to: str, name: str, options: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    net, images = fresh(name, 16, options=options), noise(20, 3, 16, 16)
    done = export(net, to, tmp_path / "net", Sample(images, None))
    torch.testing.assert_close(FORMATS[to].open(done.path)(images), net(images).softmax(1))
    assert [file.name for file in tmp_path.iterdir()] == ["net"]
    assert capfd.readouterr() == ("", "")


def test_an_onnx_file_says_what_it_takes_and_gives(tmp_path: Path) -> None:
    import onnxruntime

    export(fresh("lenet", 20, 1), "onnx", tmp_path / "a.onnx", Sample(noise(3, 1, 20, 20), None))
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx", providers=["CPUExecutionProvider"])
    (given,), (answered,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.type, given.shape) == ("images", "tensor(uint8)", ["batch", 1, 20, 20])
    assert (answered.name, answered.type, answered.shape) == ("probabilities", "tensor(float)", ["batch", 4])
    said = session.get_modelmeta().custom_metadata_map
    assert (said["format"], said["net"], said["channels"]) == (FORMAT, "lenet", "1")
    assert json.loads(said["classes"]) == CLASSES
    assert json.loads(said["image_size"]) == [20, 20]
    assert said["input"] == "images: uint8 (batch, 1, 20, 20), grey, 0 to 255, not normalised"
    assert str(Path(export_module.__file__).parent).encode() not in (tmp_path / "a.onnx").read_bytes()


def test_a_torch_export_file_carries_the_same_words(tmp_path: Path) -> None:
    net = fresh("tudui", 16)
    export(net, "torch-export", tmp_path / "a.pt2", Sample(noise(3, 3, 16, 16), None))
    extra = {METADATA_FILE: ""}
    torch.export.load(tmp_path / "a.pt2", extra_files=extra)
    assert json.loads(extra[METADATA_FILE]) == export_module.metadata(net)


def test_a_safetensors_copy_is_a_run_s_model(tmp_path: Path) -> None:
    net = fresh("tudui", 16)
    export(net, "safetensors", tmp_path / "a.safetensors", Sample(noise(3, 3, 16, 16), None))
    assert load_model_file(tmp_path / "a.safetensors").card == net.card


# ---- int8


def test_int8_is_smaller_and_decides_nearly_alike(run: Path, tmp_path: Path) -> None:
    net = load_model_file(run)
    train, test = (shapes(train, image_size=16, num_classes=4, count=200) for train in (True, False))
    sample = Sample(test.images.permute(0, 3, 1, 2), test.labels)
    done = export(net, "onnx", tmp_path / "int8.onnx", sample, train.images.permute(0, 3, 1, 2))
    plain = export(net, "onnx", tmp_path / "float.onnx", sample)
    assert done.check.agreement >= 0.95
    assert 0 < done.check.difference > plain.check.difference
    assert done.check.accuracy and plain.check.accuracy
    assert done.check.accuracy[0] == plain.check.accuracy[0] == plain.check.accuracy[1] > 0.3
    assert done.size < 0.55 * plain.size  # a quarter, and the names of nodes and classes
    said = {entry.key: entry.value for entry in onnx.load(done.path).metadata_props}
    assert said["format"] == FORMAT
    assert "calibrated on 200 training images" in said["quantized"]


def test_small_layers_at_both_ends_stay_in_float_and_large_ones_do_not() -> None:
    quantised, kept = export_module._layers(onnx_model(fresh("lenet", 32)))
    assert (len(quantised), len(kept)) == (3, 2)
    quantised, kept = export_module._layers(onnx_model(fresh("signs_mlp", 16)))  # whose first layer holds nearly all weights
    assert (len(quantised), len(kept)) == (2, 1)


def test_a_net_that_int8_changes_too_much_is_told_and_not_kept(run: Path, tmp_path: Path) -> None:
    dark = torch.zeros(64, 3, 16, 16, dtype=torch.uint8)  # ranges of black images cut off all others
    images = shapes(False, image_size=16, num_classes=4, count=100)
    with pytest.raises(
        Failure, match=r"int8 changes too much of this net: \d+\.\d% of the decisions agree .*leave --quantize out"
    ):
        export(load_model_file(run), "onnx", tmp_path / "a.onnx", Sample(images.images.permute(0, 3, 1, 2), images.labels), dark)
    assert not list(tmp_path.iterdir())


# ---- what is not kept


def test_a_file_that_answers_otherwise_is_removed_and_the_old_one_stays(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.onnx"
    path.write_text("of before")
    other = fresh("fashion_cnn", 16)
    onnx_format = FORMATS["onnx"]
    wrong = onnx_format._replace(write=lambda net, path: onnx_format.write(other, path))
    monkeypatch.setitem(FORMATS, "onnx", wrong)
    with pytest.raises(Failure, match="does not answer as the net: a probability differs by 0"):
        export(load_model_file(run), "onnx", path, Sample(noise(9, 3, 16, 16), None))
    assert [file.name for file in tmp_path.iterdir()] == ["a.onnx"]
    assert path.read_text() == "of before"


def test_a_place_that_cannot_be_written_is_named(run: Path, tmp_path: Path) -> None:
    with pytest.raises(Failure, match=r"cannot write .*nowhere.*--out"):
        export(load_model_file(run), "torch-export", tmp_path / "nowhere" / "a.pt2", Sample(noise(1, 3, 16, 16), None))


def test_the_check_sees_a_single_batch_size_that_comes_out_wrong() -> None:
    net = fresh("tudui", 16)
    right = runner_of(net)
    images = noise(30, 3, 16, 16)
    for size in (1, 7, 256):
        found = check(right, lambda part, size=size: right(part) + 0.5 * (len(part) == size), images, None)
        assert found.difference == pytest.approx(0.5, abs=1e-5), size
    assert check(right, right, images, None) == Check(30, pytest.approx(0, abs=1e-6), 30, None)
    assert check(right, lambda part: right(part)[:, :3], images, None).difference == float("inf")
    assert check(right, lambda part: right(part) * float("nan"), images, None).difference == float("inf")


def test_the_check_counts_decisions_and_right_answers() -> None:
    before = torch.eye(4)
    after = before[[1, 1, 2, 3]]
    images = torch.arange(4, dtype=torch.uint8).view(4, 1, 1, 1)
    found = check(
        lambda part: before[part.flatten().int()], lambda part: after[part.flatten().int()], images, torch.tensor([0, 1, 2, 0])
    )
    assert found == Check(4, 1.0, 3, (0.75, 0.5))


@pytest.mark.parametrize(
    ("found", "int8", "kept"),
    [
        (Check(100, 9e-5, 100, (0.9, 0.9)), False, True),
        (Check(100, 2e-4, 100, (0.9, 0.9)), False, False),
        (Check(100, float("nan"), 100, None), False, False),
        (Check(100, 0.3, 95, (0.90, 0.885)), True, True),
        (Check(100, 0.3, 95, None), True, True),
        (Check(100, 0.3, 94, (0.90, 0.90)), True, False),
        (Check(100, 0.3, 99, (0.90, 0.87)), True, False),
        (Check(100, float("inf"), 99, (0.90, 0.90)), True, False),
    ],
)
def test_the_limits_of_disagreement(found: Check, int8: bool, kept: bool) -> None:
    if kept:
        refuse_disagreement(found, int8)
        return
    with pytest.raises(Failure, match="not kept"):
        refuse_disagreement(found, int8)


def test_times_are_taken_in_turn() -> None:
    order: list[int] = []
    runners = [lambda images, number=number: order.append(number) or images for number in (0, 1)]
    taken = latencies(runners, noise(1, 1, 2, 2), seconds=0, min_turns=3)
    assert order == [0, 1] * 4
    assert [len(times) for times in taken] == [3, 3]


# ---- what is asked for


def test_what_is_missing_or_meaningless_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="Did you mean onnx"):
        check_request("onxx", None)
    with pytest.raises(UsageError, match="--quantize knows int8 only"):
        check_request("onnx", "int4")
    with pytest.raises(UsageError, match="with --to onnx"):
        check_request("torch-export", "int8")
    found = export_module.find_spec
    monkeypatch.setattr(export_module, "find_spec", lambda name: None if name.startswith("onnx") else found(name))
    with pytest.raises(Failure) as told:
        check_request("onnx", None)
    assert str(told.value) == (
        '--to onnx needs onnx and onnxscript and onnxruntime, not installed here: pip install "cifar-lit[export]"'
    )
    check_request("torch-export", None)


def test_files_go_beside_the_model() -> None:
    model = Path("runs/a-1/model.safetensors")
    assert default_path(model, "onnx", None) == Path("runs/a-1/model.onnx")
    assert default_path(model, "onnx", "int8") == Path("runs/a-1/model.int8.onnx")
    assert default_path(model, "torch-export", None) == Path("runs/a-1/model.pt2")
    with pytest.raises(UsageError, match="--out"):
        default_path(model, "safetensors", None)
