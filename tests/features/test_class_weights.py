"""Class weights in the loss, equal on any number of devices, and the score that selects the best checkpoint."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cifar_lit.data.hard_rounds import LastLosses
from cifar_lit.training.class_weights import ClassWeights, class_weights
from small_runs import BATCHES, Rows, classifier, fitted, shapes_data, trainer, weights
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassCalibrationError

from cifar_lit.data.batch import Batch
from cifar_lit.data.datamodule import ImageData
from cifar_lit.errors import UsageError
from cifar_lit.training.checkpoint import best_checkpoint, last_checkpoint, read_checkpoint
from cifar_lit.training.metrics import Score

COUNTS = [5000, 50, 0, 500]


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("balanced", COUNTS), ("effective", [sum(0.999**place for place in range(count)) for count in COUNTS])],
)
def test_class_weights_are_inverse_to_class_sizes_with_mean_1(kind: str, sizes: list[float]) -> None:
    first, second, none, fourth = class_weights(torch.tensor(COUNTS), kind)
    assert none == 0
    assert second / first == pytest.approx(sizes[0] / sizes[1], rel=1e-9)
    assert fourth / first == pytest.approx(sizes[0] / sizes[3], rel=1e-9)
    assert 5000 * first + 50 * second + 500 * fourth == pytest.approx(5550, rel=1e-9)


def unequal_data(**settings: Any) -> ImageData:
    """Return images with three in four labelled as class 0, and none as class 9."""
    data = shapes_data(**settings)
    labels = torch.where(torch.arange(120) % 4 > 0, 0, data.train_images.labels.clamp_max(8))
    data.parts.train_images = replace(data.train_images, labels=labels)
    return data


def weighing(weights: Tensor) -> Any:
    """Return the loss hook for the given class weights."""
    feature = ClassWeights("balanced")
    feature.weights = weights
    return feature._weigh


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
    model.loss_hooks.append(weighing(given))
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
    model.loss_hooks.append(weighing(torch.tensor([2.0, 4.0, *[100.0] * 8])))
    first, second = F.cross_entropy(model(images), targets, label_smoothing=0.2, reduction="none")
    loss = model.training_step(Batch(images, labels, labels, 1.0, targets), 0)
    torch.testing.assert_close(loss, (3.5 * first + 4.0 * second) / 2)


def test_skip_easy_uses_losses_without_class_weights() -> None:
    """Weighted losses would keep rare classes and skip common ones, however well they are learnt."""
    torch.manual_seed(1)
    images, labels = torch.randn(2, 3, 16, 16), torch.tensor([0, 1])
    model = classifier()
    recorded = LastLosses(2, torch.device("cpu"))
    model.loss_hooks = [recorded, weighing(torch.tensor([0.5, 50.0, *[0.0] * 8]))]
    model.training_step(Batch(images, labels, torch.arange(2)), 0)
    torch.testing.assert_close(recorded.latest, F.cross_entropy(model(images), labels, reduction="none").detach())
    assert not recorded.latest.requires_grad  # the autograd graph is freed


def test_a_fit_counts_its_training_images_and_validates_without_weights() -> None:
    rows, model, data = Rows(), classifier(class_weights="balanced"), unequal_data()
    plain = classifier()
    fitted(plain, unequal_data(), max_epochs=1)
    done = fitted(model, data, logger=rows, max_epochs=1)
    assert not torch.equal(*(next(each.parameters()) for each in (model, plain)))
    counts = torch.bincount(data.train_images.labels[data.split[0]], minlength=10)
    assert counts[0] > 70 and counts[9] == 0
    (weighted,) = (each for each in done.callbacks if isinstance(each, ClassWeights))
    # The training images of each class weigh alike, those of all classes together as much as without weights.
    assert (weighted.weights * counts).tolist() == pytest.approx([*[100 / 9] * 9, 0.0])
    images, labels = (values[data.split[1]] for values in (data.train_images.images, data.train_images.labels))
    logits = model.eval()((images.permute(0, 3, 1, 2) / 255 - 0.5) / 0.25)
    assert rows.curve("val/loss") == pytest.approx({BATCHES: F.cross_entropy(logits, labels).item()}, abs=1e-5)
    assert weights(model).keys() == weights(plain).keys()  # checkpoints are interchangeable


def test_weights_without_training_images_to_count_are_refused() -> None:
    loader = DataLoader([Batch(torch.zeros(2, 3, 16, 16), torch.arange(2), torch.arange(2))], batch_size=None)
    with pytest.raises(UsageError, match="class_weights balanced needs class_counts of the datamodule"):
        trainer(max_epochs=1).fit(classifier(class_weights="balanced"), loader)


# ---- the best checkpoint


def score(loss: float, *right: int) -> Score:
    """Return the score for the numbers of correct predictions, of 10 images of class 0 and 2 of class 1."""
    first, second = right
    confusion = [[first, 10 - first], [2 - second, second]]
    return Score((first + second) / 12, loss, 12, [first / 10, second / 2], confusion)


SCORES = [score(0.5, 6, 1), score(0.75, 10, 0), score(1.0, 7, 2), score(math.nan, 10, 2)]


@pytest.mark.parametrize(("monitor", "best"), [("accuracy", 1), ("loss", 0), ("balanced_accuracy", 2), ("macro_f1", 2)])
def test_the_monitored_score_selects_the_best_finite_checkpoint(tmp_path: Path, monitor: str, best: int) -> None:
    scores, done = iter(SCORES), 0
    while done < len(SCORES):  # in two parts: the second resumes the first
        model = classifier(monitor=monitor)
        model.evaluation.compute = lambda: next(scores)  # type: ignore[method-assign]
        saved, last = best_checkpoint(*model.monitored), last_checkpoint()
        saved.dirpath = last.dirpath = str(tmp_path)
        resume = tmp_path / "last.ckpt" if done else None
        done += 2
        fitted(model, shapes_data(), saved, last, max_epochs=done, resume=resume)
    assert read_checkpoint(tmp_path / "best.ckpt")["epoch"] == best
    assert float(saved.best_model_score) == pytest.approx(SCORES[best].values[monitor])


def test_a_users_metric_is_monitored_in_its_own_direction() -> None:
    metrics = {"calibration_error": MulticlassCalibrationError(10)}
    assert classifier(metrics=metrics, monitor="calibration_error").monitored == ("val/calibration_error", "min")
    assert classifier(monitor="top5").monitored == ("val/top5", "max")
    with pytest.raises(
        UsageError, match=r"one of accuracy, .*, top5, calibration_error, not 'calibration'\. Did you mean c"
    ):
        classifier(metrics=metrics, monitor="calibration")
    with pytest.raises(UsageError, match=r"macro_f1, not 'top5'"):
        classifier(num_classes=5, monitor="top5")
