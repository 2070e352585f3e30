"""Compute embeddings of images. `report` compares them to find test images that resemble training images."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from cifar_lit.inference.load import Classifier
from cifar_lit.inference.model_file import READ_AT_ONCE, batch_size_of


def logits_and_embeddings(
    classifier: Classifier, take: Callable[[Tensor], Tensor], rows: Tensor, advance: Callable[[int], None]
) -> tuple[Tensor, Tensor]:
    """Compute logits and embeddings of rows of a set, which may be larger than the memory.

    The embedding of an image is the input of the last linear or convolutional layer; feature maps are averaged.

    Args:
        take: returns the images of some rows, uint8 (B, H, W, C).
        rows: int64 (N,), at least one.
        advance: callback with the number of images processed since the last call.

    Returns:
        Float32 logits (N, classes) and embeddings (N, features), on the CPU.
    """
    logits, embeddings = [], []
    last: list[Tensor] = []

    def keep_input(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        last[:] = [inputs[0]]

    with ExitStack() as hooks:
        for layer in classifier.net.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                hooks.enter_context(layer.register_forward_pre_hook(keep_input))
        for part in rows.split(READ_AT_ONCE):
            images = take(part).permute(0, 3, 1, 2)
            for batch in images.split(batch_size_of(images)):
                logits.append(classifier(batch))
                features = last[0].float()
                if features.ndim == 4:
                    features = features.mean((2, 3))
                embeddings.append(features.flatten(1).cpu())
            advance(len(part))
    return torch.cat(logits), torch.cat(embeddings)
