"""Weights of unequal classes in the loss, the same on any number of devices, and figures that the best checkpoint goes by."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import BATCHES, Rows, classifier, fitted, shapes_data, trainer, weights
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassCalibrationError

from cifar_lit.data.batch import Batch
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.hard_rounds import LastLosses
from cifar_lit.errors import UsageError
from cifar_lit.training.checkpoint import best_checkpoint, last_checkpoint, read_checkpoint
from cifar_lit.training.class_weights import ClassWeights, class_weights
from cifar_lit.training.metrics import Score

COUNTS = [5000, 50, 0, 500]


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("balanced", COUNTS), ("effective", [sum(0.999**place for place in range(count)) for count in COUNTS])],
)
def test_weights_are_inverse_to_the_sizes_of_classes_with_a_mean_of_1_over_images(
    kind: str, sizes: list[float]
) -> None:
    first, second, none, fourth = class_weights(torch.tensor(COUNTS), kind)
    assert none == 0
    assert second / first == pytest.approx(sizes[0] / sizes[1], rel=1e-9)
    assert fourth / first == pytest.approx(sizes[0] / sizes[3], rel=1e-9)
    assert 5000 * first + 50 * second + 500 * fourth == pytest.approx(5550, rel=1e-9)


def unequal_data(**settings: Any) -> ImageData:
    """Drawn images, of which three in four are said to be of class 0, and none of class 9."""
    data = shapes_data(**settings)
    labels = data.train_images.labels
    data.parts.train_images = replace(
        data.train_images, labels=torch.where(torch.arange(120) % 4 > 0, 0, labels.clamp_max(8))
    )
    return data


def weighing(weights: Tensor) -> Any:
    """The loss hook of given class weights."""
    feature = ClassWeights("balanced")
    feature.weights = weights
    return feature._weigh


def gradient(model: Any, parts: Sequence[Batch]) -> Tensor:
    """Of the first weights, averaged over devices that have these parts of a batch."""
    model.zero_grad()
    for part in parts:
        (model.training_step(part, 0) / len(parts)).backward()
    return next(model.parameters()).grad.clone()


def test_the_gradient_is_of_the_weighted_losses_over_the_number_of_images_on_any_number_of_devices() -> None:
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


def test_a_mixed_image_is_weighed_by_its_shares_of_the_classes_with_the_whole_of_its_smoothed_loss() -> None:
    torch.manual_seed(1)
    images, labels, targets = torch.randn(2, 3, 16, 16), torch.tensor([0, 1]), torch.zeros(2, 10)
    targets[0, :2] = torch.tensor([0.25, 0.75])
    targets[1, 1] = 1.0
    model = classifier(label_smoothing=0.2)
    model.loss_hooks.append(weighing(torch.tensor([2.0, 4.0, *[100.0] * 8])))
    first, second = F.cross_entropy(model(images), targets, label_smoothing=0.2, reduction="none")
    loss = model.training_step(Batch(images, labels, labels, 1.0, targets), 0)
    torch.testing.assert_close(loss, (3.5 * first + 4.0 * second) / 2)


def test_images_are_left_out_by_their_plain_losses_whatever_their_classes_weigh() -> None:
    """Weighted losses would keep the rare classes and leave out the common ones, however well either is learnt."""
    torch.manual_seed(1)
    images, labels = torch.randn(2, 3, 16, 16), torch.tensor([0, 1])
    model = classifier()
    recorded = LastLosses(2, torch.device("cpu"))
    model.loss_hooks = [recorded, weighing(torch.tensor([0.5, 50.0, *[0.0] * 8]))]
    model.training_step(Batch(images, labels, torch.arange(2)), 0)
    torch.testing.assert_close(recorded.latest, F.cross_entropy(model(images), labels, reduction="none").detach())
    assert not recorded.latest.requires_grad  # no graph of the step stays alive


def test_a_fit_takes_the_weights_from_its_training_images_and_validates_without() -> None:
    rows, model, data = Rows(), classifier(class_weights="balanced"), unequal_data()
    plain = classifier()
    fitted(plain, unequal_data(), max_epochs=1)
    done = fitted(model, data, logger=rows, max_epochs=1)
    assert not torch.equal(*(next(each.parameters()) for each in (model, plain)))
    counts = torch.bincount(data.train_images.labels[data.split[0]], minlength=10)
    assert counts[0] > 70 and counts[9] == 0
    (weighted,) = (each for each in done.callbacks if isinstance(each, ClassWeights))
    assert weighted.weights.tolist() == pytest.approx(class_weights(counts, "balanced"))
    images, labels = (
        data.train_images.images[data.split[1]].permute(0, 3, 1, 2),
        data.train_images.labels[data.split[1]],
    )
    logits = model.eval()((images / 255 - 0.5) / 0.25)
    assert rows.of("val/loss") == pytest.approx({BATCHES: F.cross_entropy(logits, labels).item()}, abs=1e-5)
    assert weights(model).keys() == weights(plain).keys()  # so that either's checkpoint is the other's


def test_weights_without_training_images_to_count_are_refused() -> None:
    loader = DataLoader([Batch(torch.zeros(2, 3, 16, 16), torch.arange(2), torch.arange(2))], batch_size=None)
    with pytest.raises(UsageError, match="class_weights balanced needs class_counts of the datamodule"):
        trainer(max_epochs=1).fit(classifier(class_weights="balanced"), loader)


# ---- the best checkpoint


def score(loss: float, *right: int) -> Score:
    """Of 10 images of class 0 and 2 of class 1, so many of each named rightly."""
    first, second = right
    confusion = [[first, 10 - first], [2 - second, second]]
    return Score((first + second) / 12, loss, 12, [first / 10, second / 2], confusion)


SCORES = [score(0.5, 6, 1), score(0.75, 10, 0), score(1.0, 7, 2), score(math.nan, 10, 2)]


@pytest.mark.parametrize(("monitor", "best"), [("accuracy", 1), ("loss", 0), ("balanced_accuracy", 2), ("macro_f1", 2)])
def test_the_best_checkpoint_is_of_the_epoch_that_the_figure_names_and_never_a_diverged_one(
    tmp_path: Path, monitor: str, best: int
) -> None:
    scores, done = iter(SCORES), 0
    while done < len(SCORES):  # in two sittings: the second one knows the best of the first
        model = classifier(monitor=monitor)
        model.evaluation.compute = lambda: next(scores)  # type: ignore[method-assign]
        kept, last, resume = (
            best_checkpoint(*model.monitored),
            last_checkpoint(),
            tmp_path / "last.ckpt" if done else None,
        )
        kept.dirpath = last.dirpath = str(tmp_path)
        done += 2
        fitted(model, shapes_data(), kept, last, max_epochs=done, resume=resume)
    assert read_checkpoint(tmp_path / "best.ckpt")["epoch"] == best
    assert float(kept.best_model_score) == pytest.approx(SCORES[best].values[monitor])


def test_a_metric_of_ones_own_can_be_monitored_in_the_direction_that_it_has() -> None:
    metrics = {"calibration_error": MulticlassCalibrationError(10)}
    assert classifier(metrics=metrics, monitor="calibration_error").monitored == ("val/calibration_error", "min")
    assert classifier(monitor="top5").monitored == ("val/top5", "max")
    with pytest.raises(
        UsageError, match=r"one of accuracy, .*, top5, calibration_error, not 'calibration'\. Did you mean c"
    ):
        classifier(metrics=metrics, monitor="calibration")
    with pytest.raises(UsageError, match=r"macro_f1, not 'top5'"):
        classifier(num_classes=5, monitor="top5")
