"""How unlike the training images a picture is: its distance to the nearest of them in the net's own embedding.

The method is that of Sun et al., "Out-of-Distribution Detection with Deep Nearest Neighbors" (ICML 2022): embeddings scaled to
length 1, and the distance to the k-th nearest of a sample of training images.

Measured: the net of fast94, trained on all of CIFAR-10 (JPEG), against `shapes`: area under the ROC curve 0.900, false alarms
13.5 %, misses 24.6 %; the net of quickstart, trained on `shapes`, against CIFAR-10 (JPEG): 0.945, 6.3 % and 22.8 %. Relative
Mahalanobis distances (0.921 and 0.870), energy (0.900 and 0.853) and the highest probability (0.877 and 0.901) are each worse
on one of the two. The 13.5 % would be 5 % with validation images (--data.val_size 0.1), which fast94 keeps none of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

MAX_KNOWN, MAX_HELD_OUT = 1_500, 500  # images; as many cost about 2 s with the net of CIFAR-10's records on two CPU cores
FALSE_ALARMS = 0.05  # of the held-out images are marked
NEIGHBOUR = 5  # k; with a sample of this size 1 to 10 are equally good
MIN_HELD_OUT = 20  # of fewer, 5 % is less than an image

Embed = Callable[[Tensor], tuple[Tensor, Tensor]]  # uint8 images (B, C, H, W) to logits and embeddings (B, features)


def learn_novelty(embed: Embed, images: Tensor, train: Tensor, val: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """What `novelty` needs: a sample of embeddings, and a threshold that 5 % of held-out images lie above.

    Args:
        embed: `Classifier.logits_and_embeddings`.
        images: uint8 (N, H, W, C), not augmented; `train` and `val` are int64 indices of those trained and validated on.

    Returns:
        Tensors and settings by name; None where there are too few images, or all embeddings are alike or not finite.
    """
    known, held_out, source = choose(train, val)
    if len(held_out) < MIN_HELD_OUT or len(known) < 2 * NEIGHBOUR:
        return None

    known_embeddings, held_out_embeddings = (embed(images[rows].permute(0, 3, 1, 2))[1] for rows in (known, held_out))
    sample = normalize(known_embeddings.float()).half()
    if not sample.numel() or not sample.isfinite().all() or not sample.std(0).max() > 1e-4:  # all images look the same to it
        return None
    tensors = {"known": sample}
    settings: dict[str, Any] = {"method": "nearest neighbours", "neighbour": NEIGHBOUR, "held_out": source}
    threshold = float(novelty(held_out_embeddings, tensors, settings).quantile(1 - FALSE_ALARMS))
    if not math.isfinite(threshold):
        return None
    return tensors, {**settings, "threshold": round(threshold, 6), "images": [len(known), len(held_out)]}


def choose(train: Tensor, val: Tensor) -> tuple[Tensor, Tensor, str]:
    """Indices of the images to compare with, and of those held out, drawn from a fixed seed; and what the latter are.

    Held out are validation images if there are enough, else training images that are not compared with. The net knows these
    too, so that then more than 5 % of new images are marked.
    """
    generator = torch.Generator().manual_seed(0)
    order = train[torch.randperm(len(train), generator=generator)]
    if len(val) >= MIN_HELD_OUT:
        held_out, source = val[torch.randperm(len(val), generator=generator)][:MAX_HELD_OUT], "validation"
    else:
        held_out, source = order[: min(MAX_HELD_OUT, len(order) // 4)], "train"
        order = order[len(held_out) :]
    return order[:MAX_KNOWN].sort().values, held_out.sort().values, source


def novelty(embeddings: Tensor, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Tensor:
    """Distances float32 (B,), 0 … 2, of embeddings (B, features) to the k-th nearest of the known ones; more is less alike."""
    known = normalize(tensors["known"].float())  # kept in half precision
    similarity = (normalize(embeddings.float()) @ known.T).topk(settings["neighbour"], dim=1).values[:, -1]
    return (2 - 2 * similarity).clamp_min(0).sqrt()
