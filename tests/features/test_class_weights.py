"""Class weights in the loss, equal on any number of devices."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_runs import classifier, features, fitted, shapes_data
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.image_set import Batch
from cifar_lit.features.class_weights import ClassWeights, class_weights


def test_class_weights_are_inverse_to_class_sizes_with_mean_1() -> None:
    assert class_weights(torch.tensor([10, 2, 0])).tolist() == pytest.approx([0.6, 3.0, 0.0])  # 10 · 0.6 + 2 · 3 = 12


def unequal_data(**settings: Any) -> ImageData:
    """Return images with three in four labelled as class 0, and none as class 9."""
    data = shapes_data(**settings)
    labels = torch.where(torch.arange(120) % 4 > 0, 0, data.train_images.labels.clamp_max(8))
    data.parts.train_images = replace(data.train_images, labels=labels)
    return data


def weighing(weights: Tensor) -> Any:
    """Return the change of the loss for the given class weights."""
    feature = ClassWeights()
    feature.weights = weights
    return feature.weigh


def gradient(model: Any, parts: Sequence[Batch]) -> Tensor:
    """Return the gradient of the first layer, averaged over devices with these parts of a batch."""
    model.zero_grad()
    for part in parts:
        (model.training_step(part, 0) / len(parts)).backward()
    return next(model.parameters()).grad.clone()


def test_the_weighted_gradient_is_equal_on_any_number_of_devices() -> None:
    torch.manual_seed(1)
    images, labels = torch.randn(13, 3, 16, 16), torch.tensor([0] * 8 + [1] * 4 + [2])
    model, given = classifier(), torch.tensor([0.5, 1.0, 5.0, *[0.0] * 7])
    model.loss.changes.append(weighing(given))
    loss = F.cross_entropy(model(images), labels, weight=given, reduction="sum") / 13
    (expected,) = torch.autograd.grad(loss, [next(model.parameters())])
    for world in (1, 2, 3):
        rows = torch.arange(13).tensor_split(world)
        parts = [Batch(images[part], labels[part], part, len(part) * world / 13) for part in rows]
        torch.testing.assert_close(gradient(model, parts), expected, rtol=1e-4, atol=1e-7)


def test_the_smoothed_loss_of_a_mixed_image_is_weighted_by_its_shares() -> None:
    torch.manual_seed(1)
    images, labels, targets = torch.randn(2, 3, 16, 16), torch.tensor([0, 1]), torch.zeros(2, 10)
    targets[0, :2] = torch.tensor([0.25, 0.75])
    targets[1, 1] = 1.0
    model = classifier(label_smoothing=0.2)
    model.loss.changes.append(weighing(torch.tensor([2.0, 4.0, *[100.0] * 8])))
    first, second = F.cross_entropy(model(images), targets, label_smoothing=0.2, reduction="none")
    loss = model.training_step(Batch(images, labels, labels, 1.0, targets), 0)
    torch.testing.assert_close(loss, (3.5 * first + 4.0 * second) / 2)


def test_skip_easy_uses_losses_without_class_weights() -> None:
    """Weighted losses would keep rare classes and skip common ones, however well they are learnt."""
    losses = []
    for settings in ({"skip_easy": {}}, {"class_weights": {}, "skip_easy": {}}):
        added: list[Any] = features(settings)
        fitted(classifier(lr=1e-12), unequal_data(), *reversed(added), max_epochs=1)  # in any order
        losses.append(added[0].state_dict()["losses"])
    torch.testing.assert_close(*losses)


def test_a_fit_counts_its_training_images() -> None:
    model, data, weighted = classifier(), unequal_data(), ClassWeights()
    plain = classifier()
    fitted(plain, unequal_data(), max_epochs=1)
    fitted(model, data, weighted, max_epochs=1)
    assert not torch.equal(*(next(each.parameters()) for each in (model, plain)))
    counts = torch.bincount(data.train_images.labels[data.split[0]], minlength=10)
    assert counts[0] > 70 and counts[9] == 0
    # The training images of each class weigh alike, those of all classes together as much as without weights.
    assert (weighted.weights * counts).tolist() == pytest.approx([*[100 / 9] * 9, 0.0])
    fitted(model, unequal_data(), max_epochs=1)
    assert not model.loss.changes  # a fit does not inherit the weights of another
