"""A net with random weights that is used as a trained one, and what classifies with it on the command line."""

from __future__ import annotations

from pathlib import Path

import torch

from cifar_lit.inference.novelty import learn_novelty
from cifar_lit.models.registry import build_net
from cifar_lit.runs.model_file import ModelCard, load_model_file, save_weights

CLASSES = ["cat", "dog", "eel", "fox"]


def write_net(
    folder: Path, net: str = "shapenet", channels: int = 3, novelty: bool = False, images: torch.Tensor | None = None
) -> Path:
    """A run folder with the weights of a net of 32 × 32 images and four classes; with novelty, learnt from some images."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    fresh = build_net(net, channels=channels, image_size=32, num_classes=len(CLASSES))
    card = ModelCard(net, 1.0, [channels, 32, 32], CLASSES, [0.5] * channels, [0.25] * channels)
    path = folder / "model.safetensors"
    save_weights(path, fresh.state_dict(), card)
    if novelty:
        images = torch.randint(0, 256, (200, 32, 32, channels), dtype=torch.uint8) if images is None else images
        from dataclasses import replace

        from cifar_lit.inference.load import Classifier

        count = len(images)
        embed = Classifier(load_model_file(path)).logits_and_embeddings
        learned = learn_novelty(embed, images, torch.arange(count // 2), torch.arange(count // 2, count))
            Classifier(load_model_file(path)).logits_and_embeddings,
            images,
            torch.arange(count // 2),
            torch.arange(count // 2, count),
        )
        assert learned is not None
        save_weights(path, fresh.state_dict(), replace(card, novelty=learned[1]), learned[0])
    return folder
