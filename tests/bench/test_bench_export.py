"""`cifar-lit bench export`: the figures of each form beside the net's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from cifar_lit.bench.commands import bench
from cifar_lit.data.shapes import class_names
from cifar_lit.inference.export import latencies
from cifar_lit.models.registry import build_net
from cifar_lit.runs.model_file import ModelCard, save_weights


def test_each_form_has_its_figures_beside_the_nets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cifar_lit.inference.export.latencies", lambda *args: latencies(*args, 0, min_turns=1))
    monkeypatch.setattr("cifar_lit.inference.export.MIN_AGREEMENT", 0.0)  # of a net that is not trained
    monkeypatch.setattr("cifar_lit.inference.export.MAX_ACCURACY_LOSS", 1.0)
    torch.manual_seed(0)
    net = build_net("fashion_cnn", channels=3, image_size=16, num_classes=4)
    card = ModelCard("fashion_cnn", 1.0, [3, 16, 16], list(class_names(4)), [0.5] * 3, [0.25] * 3)
    save_weights(tmp_path / "model.safetensors", net.state_dict(), card)
    settings = {"dataset": "shapes", "image_size": 16, "num_classes": 4, "count": 200}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"data": settings}))

    bench(["export", str(tmp_path), "--images", "30", "--json", str(tmp_path / "out" / "export.json")])
    figures = json.loads((tmp_path / "out" / "export.json").read_text())
    forms = figures["forms"]
    assert list(forms) == ["PyTorch", "onnx", "onnx int8", "torch-export"]
    assert figures["images"] == 30
    assert figures["settings"]["net"] == "fashion_cnn"
    assert forms["onnx"]["accuracy"] == forms["torch-export"]["accuracy"] == forms["PyTorch"]["accuracy"]
    assert forms["onnx"]["agreement"] == forms["torch-export"]["agreement"] == 1
    assert forms["onnx int8"]["difference"] > forms["onnx"]["difference"]
    assert forms["PyTorch"]["bytes"] == (tmp_path / "model.safetensors").stat().st_size
    assert set(forms["onnx"]["ms"]) == {"1", "64"}
    assert figures["headline"].keys() == figures["unit"].keys()
    assert figures["headline"]["accuracy, onnx"] == pytest.approx(100 * forms["onnx"]["accuracy"], rel=1e-4)
    printed = capsys.readouterr().out
    assert "bench export · fashion_cnn · 30 test images of shapes" in printed
    assert str(tmp_path) not in (tmp_path / "out" / "export.json").read_text()
