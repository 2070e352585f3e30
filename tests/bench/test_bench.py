from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cifar_lit.bench.commands import bench
from cifar_lit.bench.interleave import Rounds
from cifar_lit.bench.plain import PilImages, tutorial_loop
from cifar_lit.data.shapes import shapes
from cifar_lit.errors import UsageError
from cifar_lit.models.table import build_net


@pytest.mark.parametrize("name", ["step", "tutorial"])
def test_a_measurement_prints_its_table_and_writes_its_figures(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    bench([name, "--net", "lenet", "--batch-size", "8", "--steps", "2", "--rounds", "3", "--json", str(file)])
    found = json.loads(file.read_text())
    assert found["rounds"] == 3
    assert found["difference_ms"] == pytest.approx(found["ours_ms_per_step"] - found["plain_ms_per_step"], abs=2e-4)
    shown = capsys.readouterr().out
    assert "medians of 3 rounds of 2 steps each" in shown
    assert "epoch" not in shown


def test_medians_and_ratios_are_those_of_the_rounds() -> None:
    rounds = Rounds(ours=[1.0, 2.0, 4.0], plain=[2.0, 2.0, 16.0])
    assert rounds.medians() == (2.0, 2.0)
    assert rounds.ratio() == (1.0, 2.0, 4.0)


def test_the_tutorials_loop_sees_each_image_as_to_tensor_gives_it_and_learns() -> None:
    images = shapes(True, image_size=16, num_classes=2, count=32)
    pixels, label = PilImages(images)[3]
    assert torch.equal(pixels, images.images[3].permute(2, 0, 1) / 255)
    assert label == images.labels[3]
    torch.manual_seed(0)
    net = build_net("lenet", channels=3, image_size=16, num_classes=2)
    before = [parameter.clone() for parameter in net.parameters()]
    tutorial_loop(images, net, batch_size=8, lr=0.1, shuffle=False)()
    assert all(not torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["stpe"], "Did you mean step"),
        (["step", "--rounds", "1"], "--rounds 2"),
        (["step", "--stepz", "3"], "Did you mean --steps"),
    ],
)
def test_what_cannot_be_measured_is_refused(words: list[str], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        bench(words)
