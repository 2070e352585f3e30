"""Counter-based random numbers by key, row and column: reproducible, uniform and independent."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cifar_lit.data.augment import beta, uniform

COUNT = 1 << 16
ROWS = torch.arange(COUNT)


def test_the_numbers_of_a_seed_never_change() -> None:
    expected = [[2634018, 12782819], [7211452, 1422466], [10566303, 6602669]]  # in units of 2**-24
    assert (uniform(torch.tensor([0, 49_999, 2**32 - 1]), 2, "hue", 7, 3) * 2**24).tolist() == expected


@pytest.mark.parametrize("alpha", [0.2, 1.0, 8.0, 32.0, 100.0])
def test_beta_has_the_quantiles_of_the_beta_distribution(alpha: float) -> None:
    shares = beta(*uniform(ROWS, 2, "mixing", 0, 0).unbind(1), alpha).numpy()
    sample = np.random.default_rng(0).beta(alpha, alpha, COUNT)
    levels = np.arange(1, 256) / 256
    assert np.abs(np.quantile(shares, levels) - np.quantile(sample, levels)).max() < 0.02
    assert shares.min() >= 0 and shares.max() <= 1
