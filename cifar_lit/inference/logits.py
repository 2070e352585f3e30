"""Compute logits and embeddings of the images of a set, which may be larger than the memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from cifar_lit.base.text import progress
from cifar_lit.data.image_set import ImageSet
from cifar_lit.inference.model_file import LoadedNet, batch_size_of

READ_AT_ONCE = 2048  # images of a set that may be mapped from a file
# Files of a run with one row per training image, NaN for those without: probabilities by predictors that were not
# fitted on the image; and embeddings.
OUT_OF_FOLD, FEATURES = "out_of_fold.npy", "features.npy"


def logits_and_embeddings(
    net: LoadedNet, take: Callable[[Tensor], Tensor], rows: Tensor, advance: Callable[[int], object]
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
        for layer in net.net.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                hooks.enter_context(layer.register_forward_pre_hook(keep_input))
        for part in rows.split(READ_AT_ONCE):
            images = take(part).permute(0, 3, 1, 2)
            for batch in images.split(batch_size_of(images)):
                logits.append(net.logits(batch))
                features = last[0].float()
                if features.ndim == 4:
                    features = features.mean((2, 3))
                embeddings.append(features.flatten(1).cpu())
            advance(len(part))
    return torch.cat(logits), torch.cat(embeddings)


def set_logits(net: LoadedNet, images: ImageSet, rows: Tensor, what: str) -> Tensor:
    """Return float32 logits (N, classes) of rows of a set, on the CPU; the images may be larger than the memory.

    what: description of the progress.
    """
    logits = []
    with progress(what, len(rows), min_seconds=5.0) as advance:
        for part in rows.split(READ_AT_ONCE):
            logits.append(net.logits(images.take(part).permute(0, 3, 1, 2)))
            advance(len(part))
    return torch.cat(logits)
