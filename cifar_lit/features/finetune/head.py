"""Fit the last layer of a net (the head) on features of its frozen body.

The head is a multinomial logistic regression (Kornblith et al., Do Better ImageNet Models Transfer Better?, CVPR 2019).
A fitted head avoids the large gradients of a random one (Kumar et al., Fine-Tuning can Distort Pretrained Features,
ICLR 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.nn import functional as F

from cifar_lit.features.finetune.pretrained import net_head

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData


@torch.no_grad()
def compute_features(
    net: nn.Module,
    batches: Iterable[Tensor],
    precision: Callable[[], AbstractContextManager[object]],
    advance: Callable[[int], None],
) -> Tensor:
    """Return the input of the head for each image: float16 (N, features) on the CPU.

    Args:
        net: the net, in evaluation mode.
        batches: float (B, C, H, W), on the device of the net.
        precision: returns the context manager for forward passes.
        advance: progress callback with the number of images processed since the last call.
    """
    inputs: list[Tensor] = []
    head = net_head(net)
    hook = head.register_forward_pre_hook(lambda module, args: inputs.append(args[0].half().cpu()))
    with hook:
        for images in batches:
            with precision():
                net(images.type(head.weight.dtype))
            advance(len(images))
    return torch.cat(inputs)


def batches_of_view(data: ImageData, rows: Tensor, view: int) -> Iterator[Tensor]:
    """Yield normalised batches of training images on the training device.

    Args:
        rows: int64 (N,), rows of its training images.
        view: 0 for plain images. Other views are augmented like the epoch of this number with seed 0, for all seeds.
    """
    loader = replace(data.train_loader, seed=0)
    preprocessing = data.preprocessing
    images = loader.source
    make = loader.maker(view)
    for part in move_data_to_device(rows, images.images.device).split(data.loading.eval_batch_size):
        pixels = make([(part, 1.0)])[0].images if view else images.take(part)
        pixels, part = move_data_to_device((pixels, part), data.device)
        if view:
            pixels = data.augment.change(pixels, part, 0, view)
        yield preprocessing.normalise(pixels)


# ---- the head

STRENGTHS = [0.3, 0.1, 0.03, 0.01, 0.003, 0.001]  # L2 penalties, for standardised features
ITERATIONS = 60  # L-BFGS iterations for each strength, starting from the previous solution
FOLDS = 5
MAX_FOLDED = 2000  # rows of features; with more, only one fold is held out
MAX_FITTED = 100_000  # rows of features; more cost memory and hardly improve the accuracy


def fit_head(
    features: Tensor, labels: Tensor, num_classes: int, views: int, class_weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return a multinomial logistic regression with an L2 penalty of the strength that cross-validation selects.

    Args:
        features: (views · N, features), view by view.
        labels: int64 (N,).
        class_weights: float32 (classes,), weights of the loss.

    Returns:
        Weight (classes, features) and bias (classes,), float32.
    """
    targets = labels.repeat(views)
    generator = torch.Generator().manual_seed(0)
    fold = _draw_folds(labels, num_classes, generator).repeat(views)
    if len(targets) > MAX_FITTED:
        subset = torch.randperm(len(targets), generator=generator)[:MAX_FITTED].sort().values
        features, targets, fold = features[subset], targets[subset], fold[subset]
    features = features.float()
    mean, std = features.mean(0), features.std(0).clamp_min(1e-6)
    rows = (features - mean) / std
    losses = torch.zeros(len(STRENGTHS))
    fold_count = 1
    if len(rows) <= MAX_FOLDED:
        fold_count = min(FOLDS, int(fold.max()) + 1)
    for part in range(fold_count):
        held_out = fold == part
        solutions = _solve(rows[~held_out], targets[~held_out], num_classes, STRENGTHS, class_weights)
        for index, (weight, bias) in enumerate(solutions):
            losses[index] += F.cross_entropy(rows[held_out] @ weight.T + bias, targets[held_out], class_weights)
    best = int(losses.argmin())
    weight, bias = _solve(rows, targets, num_classes, STRENGTHS[: best + 1], class_weights)[-1]
    weight = weight / std
    return weight, bias - weight @ mean


def out_of_fold(features: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Return the probabilities of heads that were not fitted on the image, float32 (N, classes).

    The penalty is the strongest one, so that a few wrong labels change little. A class with all of its images in one
    fold is unknown to the head that predicts them.

    features: (N, features). labels: int64 (N,).
    """
    generator = torch.Generator().manual_seed(0)
    folds = _draw_folds(labels, num_classes, generator)
    logits = torch.zeros(len(labels), num_classes)
    for fold in folds.unique().tolist():
        held_out = folds == fold
        others = (~held_out).nonzero().flatten()
        others = others[torch.randperm(len(others), generator=generator)[:MAX_FITTED]]
        rows = features[others].float()
        mean, std = rows.mean(0), rows.std(0).clamp_min(1e-6)
        ((weight, bias),) = _solve((rows - mean) / std, labels[others], num_classes, STRENGTHS[:1], None)
        logits[held_out] = (features[held_out].float() - mean) / std @ weight.T + bias
    return logits.softmax(1)


def _draw_folds(labels: Tensor, num_classes: int, generator: torch.Generator) -> Tensor:
    """Return a fold of `FOLDS` for each label, int64 (N,), with equal shares of each class."""
    folds = torch.empty_like(labels)
    for label in range(num_classes):
        rows = (labels == label).nonzero().flatten()
        folds[rows[torch.randperm(len(rows), generator=generator)]] = torch.arange(len(rows)) % FOLDS
    return folds


def _solve(
    rows: Tensor, targets: Tensor, num_classes: int, strengths: list[float], class_weights: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    """Return weight and bias for each strength of the penalty."""
    weight = torch.zeros(num_classes, rows.shape[1], requires_grad=True)
    bias = torch.zeros(num_classes, requires_grad=True)
    solutions = []
    for strength in strengths:
        solver = torch.optim.LBFGS([weight, bias], max_iter=ITERATIONS, line_search_fn="strong_wolfe")

        def loss(strength: float = strength) -> Tensor:
            weight.grad = bias.grad = None
            penalty = strength / 2 * weight.square().sum()
            value = F.cross_entropy(rows @ weight.T + bias, targets, class_weights) + penalty
            value.backward()
            return value

        with torch.enable_grad():
            solver.step(loss)
        solutions.append((weight.detach().clone(), bias.detach().clone()))
    return solutions
