"""`cifar-lit bench serve`: a load, bad inputs, a table and the figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cifar_lit.bench.commands import bench
from cifar_lit.bench.serve import quantile
from cifar_lit.bench.table import results_text
from cifar_lit.errors import UsageError
from cifar_lit.models.registry import build_net
from cifar_lit.runs.model_file import ModelCard, save_weights

pytest.importorskip("uvicorn", reason="pip install 'cifar-lit[serve]'")


def test_a_service_is_measured_and_refuses_every_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    net = build_net("lenet", channels=3, image_size=(16, 16), num_classes=2, width=1.0, options={})
    save_weights(
        tmp_path / "model.safetensors", net.state_dict(), ModelCard("lenet", 1.0, [3, 16, 16], ["a", "b"], [0.5] * 3, [0.2] * 3)
    )
    file = tmp_path / "made" / "serve.json"
    bench(["serve", str(tmp_path), "--seconds", "0.3", "--rounds", "2", "--clients", "1,4", "--json", str(file)])
    found = json.loads(file.read_text())
    shown = capsys.readouterr().out
    assert shown.startswith("bench serve · lenet · drawn JPEGs of ")
    assert list(found["clients"]) == ["1", "4"]
    for load in found["clients"].values():
        assert load["requests"] > 5
        assert 0 < load["p50 ms"]["median"] <= load["p99 ms"]["median"]
    statuses = {name: answer["status"] for name, answer in found["bad_inputs"].items()}
    assert statuses == {
        "cut JPEG": 422,
        "PNG of 900 million pixels": 422,
        "JPEG of 3,000 scans": 422,
        "body of 100 MB": 413,
        "text as an image": 415,
        "wrong type": 415,
        "slow client": 408,
    }
    assert all(answer["goes_on"] for answer in found["bad_inputs"].values())
    assert str(tmp_path) not in file.read_text()
    assert "4 at a time, p99" in results_text([file], tmp_path)


def test_a_run_that_is_not_there_is_told_as_serve_tells_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no .*name a run folder that ended"):
        bench(["serve", str(tmp_path / "none")])


def test_a_quantile_is_one_of_the_values() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile(list(map(float, range(100))), 0.99) == 99.0
    assert quantile([7.0], 0.99) == 7.0
