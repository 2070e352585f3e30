"""Run the statements and commands of docs/from-a-hand-written-loop.md in order, on a few images instead of CIFAR-10."""

from pathlib import Path
from typing import Any

import pytest
from contract.command_line import metrics_of
from doc_pages import Page
from torchvision import datasets


def few_images(root: str, train: bool, transform: Any, download: bool) -> datasets.FakeData:
    return datasets.FakeData(60 if train else 20, (3, 32, 32), 10, transform)


@pytest.mark.slow
def test_every_block_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(datasets, "CIFAR10", few_images)
    page = Page("from-a-hand-written-loop.md")
    blocks = page.blocks()
    assert {(block.language, block.kind) for block in blocks} == {("python", "python"), ("bash", "run")}
    page.follow(blocks)
    assert sorted(path.name for path in Path("lightning_logs/sjnet-1/checkpoints").glob("epoch-*")) == ["epoch-00.ckpt"]
    metrics = metrics_of(Path("lightning_logs/lenet-1"))["test"]
    printed = capsys.readouterr().out
    assert str(metrics["accuracy"]) in printed
    assert f"({metrics['images']}, 10)" in printed  # shape of the probabilities
