import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from cifar_lit.training.metrics import Evaluation, MeanLoss, Score


@pytest.fixture
def logits() -> Tensor:
    return 4 * torch.randn(500, 7, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def labels() -> Tensor:
    return torch.randint(0, 7, (500,), generator=torch.Generator().manual_seed(1))


def evaluate(logits: Tensor, labels: Tensor, batch_size: int, classes: int = 7) -> Score:
    evaluation = Evaluation(classes)
    for part, answers in zip(logits.split(batch_size), labels.split(batch_size), strict=True):
        evaluation.update(part, answers)
    return evaluation.compute()


def test_loss_and_accuracies_are_those_of_torch_over_all_images_at_once(logits: Tensor, labels: Tensor) -> None:
    score = evaluate(logits, labels, batch_size=64)
    assert score.images == 500
    assert score.accuracy == pytest.approx(float(MulticlassAccuracy(7, average="micro")(logits, labels)), abs=1e-7)
    assert score.per_class == pytest.approx(MulticlassAccuracy(7, average="none")(logits, labels).tolist(), abs=1e-7)
    assert score.loss == pytest.approx(float(F.cross_entropy(logits.double(), labels)), abs=1e-6)
    assert [sum(row) for row in score.confusion] == torch.bincount(labels, minlength=7).tolist()
    assert sum(score.confusion[i][i] for i in range(7)) == round(score.accuracy * 500)


@pytest.mark.parametrize("batch_size", [1, 17, 500])
def test_order_and_batches_do_not_change_the_last_digit(logits: Tensor, labels: Tensor, batch_size: int) -> None:
    order = torch.randperm(500, generator=torch.Generator().manual_seed(batch_size))
    assert evaluate(logits[order], labels[order], batch_size) == evaluate(logits, labels, 100)


def test_padding_does_not_count(logits: Tensor, labels: Tensor) -> None:
    padded = torch.cat([logits, torch.full((30, 7), 50.0)])
    answers = torch.cat([labels, torch.full((30,), -1)])
    assert evaluate(padded, answers, batch_size=53) == evaluate(logits, labels, batch_size=53)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_one_image_with_a_loss_beyond_measure_makes_the_mean_not_a_number(value: float) -> None:
    mean = MeanLoss()
    mean.update(torch.tensor([1.0, value]), torch.tensor([True, True]))
    mean.update(torch.tensor([1.0]), torch.tensor([True]))
    assert math.isnan(float(mean.compute()))


def test_padding_that_is_not_a_number_leaves_the_mean_alone() -> None:
    mean = MeanLoss()
    mean.update(torch.tensor([2.0, math.nan, 4.0]), torch.tensor([True, False, True]))
    assert float(mean.compute()) == 3.0


def test_the_loss_of_a_net_that_went_astray_is_still_a_mean() -> None:
    mean = MeanLoss()
    losses = torch.tensor([3e5, 1e5, 2e5])
    for _ in range(100):
        mean.update(losses, torch.ones(3, dtype=torch.bool))
    assert float(mean.compute()) == pytest.approx(2e5, rel=1e-6)


def test_many_small_losses_do_not_vanish_beside_each_other() -> None:
    mean = MeanLoss()
    for _ in range(50):
        mean.update(torch.full((10_000,), 0.1), torch.ones(10_000, dtype=torch.bool))
    assert float(mean.compute()) == pytest.approx(0.1, abs=5e-7)


def test_a_class_without_images_has_no_accuracy(logits: Tensor) -> None:
    score = evaluate(logits, torch.zeros(500, dtype=torch.int64), batch_size=100)
    assert score.per_class[0] == score.accuracy
    assert all(math.isnan(accuracy) for accuracy in score.per_class[1:])


def test_no_images_have_no_score() -> None:
    score = Evaluation(3).compute()
    assert math.isnan(score.accuracy) and math.isnan(score.loss)
    assert score.images == 0


def test_a_reset_forgets_everything(logits: Tensor, labels: Tensor) -> None:
    evaluation = Evaluation(7)
    evaluation.update(torch.full((10, 7), math.nan), labels[:10])
    evaluation.reset()
    evaluation.update(logits, labels)
    assert evaluation.compute() == evaluate(logits, labels, 500)


def test_logits_of_half_precision_are_scored_in_full(logits: Tensor, labels: Tensor) -> None:
    half = logits.bfloat16()
    assert evaluate(half, labels, 100) == evaluate(half.float(), labels, 100)
