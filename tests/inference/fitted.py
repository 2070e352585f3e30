"""Runs of drawn figures whose nets decide with confidence, made in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from cifar_lit.data.shapes import shapes
from cifar_lit.models.registry import build_net
from cifar_lit.runs.model_file import LoadedNet, ModelCard, save_weights

DATA = {"dataset": "shapes", "image_size": 16, "num_classes": 4, "count": 400}
STEPS = 120


def fitted_run(folder: Path, net: str = "fashion_cnn", options: dict[str, Any] | None = None) -> Path:
    """A run folder with config.yaml and model.safetensors, trained by a few steps of Adam."""
    images = shapes(True, image_size=16, num_classes=4, count=400)
    card = ModelCard(net, 1.0, [3, 16, 16], list(images.classes), [0.5] * 3, [0.25] * 3, options or {})
    torch.manual_seed(0)
    bare = build_net(net, channels=3, image_size=16, num_classes=4, options=card.options)
    whole, optimizer = LoadedNet(bare, card).train(), torch.optim.Adam(bare.parameters(), lr=3e-3)
    pixels = images.images.permute(0, 3, 1, 2)
    for step in range(STEPS):
        part = torch.arange(50) + 50 * (step % 8)
        optimizer.zero_grad()
        nn.functional.cross_entropy(whole(pixels[part]), images.labels[part]).backward()
        optimizer.step()
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(folder / "model.safetensors", bare.state_dict(), card)
    (folder / "config.yaml").write_text(yaml.safe_dump({"data": DATA}))
    return folder
