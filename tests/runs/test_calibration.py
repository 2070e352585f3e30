import math

import pytest
import torch

from cifar_lit.runs.charts import expected_calibration_error, reliability


def test_a_bin_holds_the_probabilities_up_to_its_upper_end() -> None:
    probability = torch.tensor([0.0, 0.2, 0.2000001, 0.5, 1.0], dtype=torch.float64)
    bins = reliability(probability, torch.tensor([True, False, True, True, True]), bins=5)
    assert [found.images for found in bins] == [2, 1, 1, 0, 1]
    assert bins[0].accuracy == 0.5
    assert bins[0].confidence == pytest.approx(0.1)
    assert math.isnan(bins[3].accuracy)


def test_the_error_is_the_mean_distance_weighted_by_the_images_of_each_bin() -> None:
    probability = torch.tensor([0.9, 0.9, 0.9, 0.6], dtype=torch.float64)
    bins = reliability(probability, torch.tensor([True, True, False, False]), bins=15)
    by_hand = 3 / 4 * abs(2 / 3 - 0.9) + 1 / 4 * 0.6
    assert expected_calibration_error(bins) == pytest.approx(by_hand)


def test_a_net_that_is_right_as_often_as_it_says_has_no_error() -> None:
    generator = torch.Generator().manual_seed(0)
    probability = torch.rand(200_000, generator=generator, dtype=torch.float64)
    hits = torch.rand(200_000, generator=generator, dtype=torch.float64) < probability
    assert expected_calibration_error(reliability(probability, hits)) < 0.01
    assert expected_calibration_error(reliability(probability, torch.ones(200_000, dtype=torch.bool))) == pytest.approx(
        0.5, abs=0.01
    )
