"""Run folders with small nets: with random weights, with scores for --reject, and trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from cifar_lit.data.shapes import shapes
from cifar_lit.inference.load import load
from cifar_lit.inference.model_file import LoadedNet, ModelCard, load_model_file, save_weights
from cifar_lit.inference.rejection import novelty, reject_scores
from cifar_lit.models.registry import build_net

CLASSES = ["cat", "dog", "eel", "fox"]


def write_net(
    folder: Path,
    net: str = "shapenet",
    channels: int = 3,
    side: int = 32,
    gain: float = 1.0,
    resize: str = "crop",
    classes: Sequence[str] = CLASSES,
) -> Path:
    """Write a run folder with random weights times `gain`. A larger gain makes predictions differ more."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    bare = build_net(net, channels=channels, image_size=side, num_classes=len(classes))
    for parameter in bare.parameters():
        parameter.data *= gain
    card = ModelCard(net, 1.0, [channels, side, side], [*classes], [0.5] * channels, [0.25] * channels, resize=resize)
    save_weights(folder / "model.safetensors", bare.state_dict(), card)
    return folder


def write_reject_net(folder: Path) -> Path:
    """Write a run folder with prediction sets, and scores for --reject that are fitted on noise.

    Noise has larger logits than pictures.
    """
    net = load_model_file(write_net(folder))
    noise = torch.randint(0, 256, (100, 3, 32, 32), dtype=torch.uint8)
    scores = reject_scores(novelty(load(folder)(noise)))
    card = replace(net.card, reject=scores, coverage={"lac": [[0.7] * 9] * 4})
    save_weights(folder / "model.safetensors", net.net.state_dict(), card)
    return folder


def write_fitted_net(folder: Path) -> Path:
    """Write a run folder with config.yaml and a net trained on shapes for 120 steps."""
    images = shapes(True, image_size=16, num_classes=4, count=400)
    card = ModelCard("fashion_cnn", 1.0, [3, 16, 16], list(images.classes), [0.5] * 3, [0.25] * 3)
    torch.manual_seed(0)
    bare = build_net("fashion_cnn", channels=3, image_size=16, num_classes=4)
    net, optimizer = LoadedNet(bare, card).train(), torch.optim.Adam(bare.parameters(), lr=3e-3)
    for step in range(120):
        batch = torch.arange(50) + 50 * (step % 8)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images.images[batch].permute(0, 3, 1, 2)), images.labels[batch]).backward()
        optimizer.step()
    folder.mkdir(parents=True)
    save_weights(folder / "model.safetensors", bare.state_dict(), card)
    data = {"dataset": "shapes", "images": {"image_size": 16, "num_classes": 4, "count": 400}}
    (folder / "config.yaml").write_text(yaml.safe_dump({"data": data}))
    return folder


def _shared(write: Callable[[Path], Path]) -> Callable[..., Path]:
    """Return a fixture with a run folder that tests must not change."""
    return pytest.fixture(scope="session")(lambda tmp_path_factory: write(tmp_path_factory.mktemp("runs") / "run-1"))


run = _shared(write_net)
reject_run = _shared(write_reject_net)
fitted_run = _shared(write_fitted_net)
served_run = _shared(lambda folder: write_net(folder, "lenet", side=16, gain=3, resize="letterbox"))
