"""The calibration error, and the temperature that is fitted on held-out images."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.functional.classification import multiclass_calibration_error

from cifar_lit.runs.calibration import expected_calibration_error, fit_temperature, reliability, tempered


def answers(images: int, sureness: float = 1.0, classes: int = 5) -> tuple[Tensor, Tensor]:
    """Logits whose softmax, before they are multiplied by `sureness`, tells how often each class is the label."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(images, classes, generator=generator)
    return sureness * logits, torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]


def error_of(probabilities: Tensor, labels: Tensor) -> float:
    probability, predicted = probabilities.max(1)
    return expected_calibration_error(reliability(probability, predicted == labels))


def test_a_bin_holds_the_probabilities_up_to_its_upper_end() -> None:
    probability = torch.tensor([0.0, 0.2, 0.2000001, 0.5, 1.0], dtype=torch.float64)
    bins = reliability(probability, torch.tensor([True, False, True, True, True]), bins=5)
    assert [part.images for part in bins] == [2, 1, 1, 0, 1]
    assert (bins[0].accuracy, bins[0].confidence) == (0.5, pytest.approx(0.1))
    assert math.isnan(bins[3].accuracy)


def test_the_error_is_that_of_torchmetrics_with_fifteen_bins() -> None:
    logits, labels = answers(3000, sureness=0.4)
    expected = multiclass_calibration_error(logits.softmax(1), labels, 5, n_bins=15)
    assert error_of(logits.softmax(1), labels) == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize("sureness", [0.1, 1.0, 10.0])
def test_the_temperature_undoes_what_made_a_net_more_or_less_sure_and_changes_no_decision(sureness: float) -> None:
    logits, labels = answers(20_000, sureness)
    temperature = fit_temperature(logits, labels)
    assert temperature == pytest.approx(sureness, rel=0.03)
    losses = {scale: float(F.cross_entropy(logits / (scale * temperature), labels)) for scale in (0.95, 1.0, 1.05)}
    assert min(losses, key=losses.__getitem__) == 1.0
    plain = logits.double().softmax(1)
    after = tempered(plain, temperature)
    torch.testing.assert_close(after, (logits.double() / temperature).softmax(1))
    assert torch.equal(after.argmax(1), plain.argmax(1))
    assert error_of(after, labels) < 0.015
    assert (error_of(plain, labels) > 0.1) == (sureness != 1)


def test_a_net_without_a_mistake_is_not_sure_without_bounds_and_the_surer_the_more_images_said_so() -> None:
    labels = torch.arange(2000) % 4
    few, many = (fit_temperature(F.one_hot(labels[:count]).float(), labels[:count]) for count in (20, 2000))
    assert few is not None and many is not None
    for temperature, count in ((few, 20), (many, 2000)):  # the least loss against labels of which 1 / (N + 2) is spread
        probability = float((F.one_hot(labels[:1], 4) / temperature).softmax(1).max())
        assert probability == pytest.approx(1 - 0.75 / (count + 2), abs=1e-5)


def test_of_too_few_images_or_of_logits_that_are_not_finite_nothing_is_fitted() -> None:
    logits, labels = answers(20)
    assert fit_temperature(logits, labels) is not None
    assert fit_temperature(logits[:19], labels[:19]) is None
    assert fit_temperature(logits[:0], labels[:0]) is None
    logits[3, 2] = torch.nan
    assert fit_temperature(logits, labels) is None
