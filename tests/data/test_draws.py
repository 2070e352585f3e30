"""Counter-based random numbers by key, row and column: reproducible, uniform and independent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from cifar_lit.data.draws import beta, uniform

COUNT = 1 << 16
ROWS = torch.arange(COUNT)


def test_the_numbers_of_a_seed_never_change() -> None:
    expected = [[2634018, 12782819], [7211452, 1422466], [10566303, 6602669]]  # in units of 2**-24
    assert (uniform(torch.tensor([0, 49_999, 2**32 - 1]), 2, "hue", 7, 3) * 2**24).tolist() == expected


def chi_square(*numbers: Tensor) -> float:
    """Return the chi-square statistic of counts in 256 grid cells, in standard deviations from its mean."""
    bins = round(256 ** (1 / len(numbers)))
    places = [(values * bins).long() * bins**place for place, values in enumerate(numbers)]
    cells = torch.stack(places).sum(0)
    expected = len(cells) / 256
    statistic = float((torch.bincount(cells, minlength=256) - expected).square().sum()) / expected
    return (statistic - 255) / (2 * 255) ** 0.5


@pytest.mark.parametrize("seed", [0, 1, 12_345])
def test_numbers_are_uniform_and_independent_of_their_neighbours(seed: int) -> None:
    numbers = uniform(ROWS, 3, "hue", seed, 0)
    neighbours = {
        "row": numbers[1:, 0],
        "row, far": numbers[4096:, 0],
        "column": numbers[:, 1],
        "epoch": uniform(ROWS, 1, "hue", seed, 1)[:, 0],
        "seed": uniform(ROWS, 1, "hue", seed + 1, 0)[:, 0],
        "seed and epoch swapped": uniform(ROWS, 1, "hue", 0, seed + 1)[:, 0],
        "stream": uniform(ROWS, 1, "blur", seed, 0)[:, 0],
    }
    assert all(abs(chi_square(numbers[:, column])) < 4 for column in range(3))
    for name, others in neighbours.items():
        ours = numbers[: len(others), 0]
        assert abs(chi_square(ours, others)) < 4, name
        assert abs(float(torch.corrcoef(torch.stack((ours, others)))[0, 1])) < 4 / COUNT**0.5, name
    lowest_bits = (numbers * 2**24).long() % 256  # patterns here reveal poor mixing
    assert abs(chi_square(lowest_bits[:, 0] / 256)) < 4


@pytest.mark.parametrize("alpha", [0.2, 1.0, 8.0, 32.0, 100.0])
def test_beta_has_the_quantiles_of_the_beta_distribution(alpha: float) -> None:
    shares = beta(*uniform(ROWS, 2, "mixing", 0, 0).unbind(1), alpha).numpy()
    sample = np.random.default_rng(0).beta(alpha, alpha, COUNT)
    levels = np.arange(1, 256) / 256
    assert np.abs(np.quantile(shares, levels) - np.quantile(sample, levels)).max() < 0.02
    assert shares.min() >= 0 and shares.max() <= 1
