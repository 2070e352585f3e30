"""Calibration error, and the temperature fitted on held-out images."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.functional.classification import multiclass_calibration_error

from cifar_lit.inference.calibration import (
    choose_temperature,
    expected_calibration_error,
    fit_temperature,
    perfect_error,
    reliability,
    tempered,
)


def make_logits(images: int, scale: float = 1.0, classes: int = 5) -> tuple[Tensor, Tensor]:
    """Return calibrated logits multiplied by `scale`, and their labels."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(images, classes, generator=generator)
    return scale * logits, torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]


def error_of(probabilities: Tensor, labels: Tensor) -> float:
    probability, predicted = probabilities.max(1)
    return expected_calibration_error(reliability(probability, predicted == labels))


def test_a_bin_includes_its_upper_end() -> None:
    probability = torch.tensor([0.0, 0.2, 0.2000001, 0.5, 1.0], dtype=torch.float64)
    bins = reliability(probability, torch.tensor([True, False, True, True, True]))
    assert [part.images for part in bins] == [1, 0, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1]
    assert (bins[2].accuracy, bins[2].confidence) == (0, pytest.approx(0.2))
    assert math.isnan(bins[1].accuracy)


def test_the_calibration_error_equals_that_of_torchmetrics_with_fifteen_bins() -> None:
    logits, labels = make_logits(3000)
    # Over- and underconfident images share bins, whose errors then depend on the number of bins.
    mixed = logits * torch.tensor([0.2, 4.0]).repeat(1500)[:, None]
    errors = {bins: float(multiclass_calibration_error(mixed.softmax(1), labels, 5, n_bins=bins)) for bins in (10, 15)}
    assert abs(errors[10] - errors[15]) > 1e-3
    assert error_of(mixed.softmax(1), labels) == pytest.approx(errors[15], abs=1e-6)


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_the_temperature_recovers_the_scale_of_the_logits_and_changes_no_prediction(scale: float) -> None:
    logits, labels = make_logits(20_000, scale)
    temperature = fit_temperature(logits, labels)
    assert temperature == pytest.approx(scale, rel=0.03)
    losses = {factor: float(F.cross_entropy(logits / (factor * temperature), labels)) for factor in (0.95, 1.0, 1.05)}
    assert min(losses, key=losses.__getitem__) == 1.0
    before = logits.double().softmax(1)
    after = tempered(before, temperature)
    torch.testing.assert_close(after, (logits.double() / temperature).softmax(1))
    assert torch.equal(after.argmax(1), before.argmax(1))
    assert error_of(after, labels) < 0.015
    assert (error_of(before, labels) > 0.1) == (scale != 1)


@pytest.mark.parametrize("count", [20, 2000])
def test_the_confidence_of_a_net_without_mistakes_is_bounded_by_the_number_of_images(count: int) -> None:
    labels = torch.arange(count) % 4
    temperature = fit_temperature(F.one_hot(labels).float(), labels)
    probability = float((F.one_hot(labels[:1], 4) / temperature).softmax(1).max())
    assert probability == pytest.approx(1 - 0.75 / (count + 2), abs=1e-5)  # labels smoothed by 1 / (N + 2)


# ---- the choice of a temperature


def test_a_temperature_that_two_wrong_labels_of_120_require_is_not_used() -> None:
    logits, labels = make_logits(5120)
    val, val_labels, test, test_labels = logits[:120].clone(), labels[:120].clone(), logits[120:], labels[120:]
    for row in (3, 50):
        val[row, 1] += 25  # class 1 with probability 1
        val_labels[row] = 0
    fitted = fit_temperature(val, val_labels)
    assert error_of((test / fitted).softmax(1), test_labels) > error_of(test.softmax(1), test_labels) + 0.05
    reason = "because one fitted on 120 validation images does not improve left-out images"
    assert choose_temperature(val, val_labels, None) == (1.0, f"1, {reason}")
    assert choose_temperature(val, val_labels, 0.9) == (0.9, f"model.temperature, {reason}")


def test_a_temperature_that_improves_only_the_images_it_was_fitted_on_is_not_used() -> None:
    logits, labels = make_logits(60)
    fitted = fit_temperature(logits, labels)
    assert F.cross_entropy(logits / fitted, labels) < F.cross_entropy(logits, labels)
    assert choose_temperature(logits, labels, None)[0] == 1


@pytest.mark.parametrize("scale", [0.4, 3.0])
def test_a_temperature_that_improves_left_out_images_is_used(scale: float) -> None:
    logits, labels = make_logits(120, scale)
    fitted = fit_temperature(logits, labels)
    assert choose_temperature(logits, labels, None) == (fitted, "fitted on 120 validation images")
    assert choose_temperature(logits, labels, fitted)[0] == fitted


def test_no_temperature_is_fitted_on_too_few_images_or_non_finite_logits() -> None:
    logits, labels = make_logits(20, 3.0)
    assert choose_temperature(logits, labels, 0.5)[0] != 0.5
    for few in (19, 0):
        assert choose_temperature(logits[:few], labels[:few], 0.5) == (0.5, "model.temperature")
    logits[3, 2] = torch.nan
    assert choose_temperature(logits, labels, None) == (None, "")


# ---- the error of a perfectly calibrated net


def test_the_error_of_a_perfectly_calibrated_net_is_that_of_labels_drawn_from_its_probabilities() -> None:
    errors = []
    for seed in range(300):
        generator = torch.Generator().manual_seed(seed)
        probabilities = (2 * torch.randn(60, 5, generator=torch.Generator().manual_seed(9))).softmax(1)
        errors.append(error_of(probabilities, torch.multinomial(probabilities, 1, generator=generator)[:, 0]))
    perfect = perfect_error(probabilities.amax(1))
    assert perfect["mean"] == pytest.approx(statistics.fmean(errors), rel=0.05)
    assert perfect["high"] == pytest.approx(sorted(errors)[285], rel=0.06)
    assert perfect == perfect_error(probabilities.amax(1))
