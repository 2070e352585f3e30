"""How unlike the training images a picture is: far from the nearest of them in the net's own embedding, and of no clear class.

The distance is that of Sun et al., "Out-of-Distribution Detection with Deep Nearest Neighbors" (ICML 2022): embeddings scaled to
length 1, and the distance to the k-th nearest of a sample of training images. It is multiplied by the perplexity of the
probabilities, as many classes as the net hesitates between.

`results/cpu/scores.json` has it beside its rivals for `laptop`: it tells CIFAR-100 apart as well as the energy, and better than
the distance alone and the largest probability; flowers as well as the entropy. With `quickstart`'s net energy and entropy were
behind it.

At a threshold that 5 % of the validation images lie above, about as many test images do; at that of training images more, so
that without validation images there is none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical
from torch.nn.functional import normalize

MAX_KNOWN = 1_500  # images; as many cost about 2 s with the net of CIFAR-10's records on two CPU cores
FALSE_ALARMS = 0.05  # of the held-out images are marked
NEIGHBOUR = 5  # k; with a sample of this size 1 to 10 are equally good
MIN_HELD_OUT = 20  # of fewer, 5 % is less than an image
METHOD = "nearest neighbours times perplexity"  # files of before have the distance alone, as "nearest neighbours"


def sample_rows(train: Tensor) -> Tensor:
    """Which of the training images, int64 rows, to compare with: at most `MAX_KNOWN`, drawn from a fixed seed."""
    return train[torch.randperm(len(train), generator=torch.Generator().manual_seed(0))][:MAX_KNOWN].sort().values


def learn_novelty(known: Tensor, embeddings: Tensor, logits: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """What `novelty` needs: a sample of embeddings, and a threshold that 5 % of held-out images lie above.

    Args:
        known: embeddings (K, features) of training images.
        embeddings, logits: (N, features) and (N, classes) of images that were not trained on. Of fewer than 20 there is no
            threshold: more than 5 % of new images lie above one of images that the net knows.

    Returns:
        Tensors and settings by name; None where there are too few images, or all embeddings are alike or not finite.
    """
    sample = normalize(known.float()).half()
    if len(sample) < 2 * NEIGHBOUR or not sample.isfinite().all() or not sample.std(0).max() > 1e-4:  # all look the same to it
        return None
    tensors = {"known": sample}
    settings: dict[str, Any] = {"method": METHOD, "neighbour": NEIGHBOUR, "images": [len(known), len(embeddings)]}
    settings["threshold"] = None
    if len(embeddings) >= MIN_HELD_OUT:
        threshold = float(novelty(embeddings, logits, tensors, settings).quantile(1 - FALSE_ALARMS))
        settings["threshold"] = round(threshold, 6) if math.isfinite(threshold) else None
    return tensors, settings


def novelty(embeddings: Tensor, logits: Tensor, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Tensor:
    """float32 (B,), 0 or more, the more the less alike: the distance to the k-th nearest known embedding, 0 … 2, times the
    perplexity, 1 … classes.

    embeddings: (B, features). logits: (B, classes), at no temperature, which would take from what they tell.
    """
    known = normalize(tensors["known"].float())  # kept in half precision
    similarity = (normalize(embeddings.float()) @ known.T).topk(settings["neighbour"], dim=1).values[:, -1]
    distances = (2 - 2 * similarity).clamp_min(0).sqrt()
    if settings.get("method") != METHOD:
        return distances
    return distances * Categorical(logits=logits.float(), validate_args=False).perplexity()
