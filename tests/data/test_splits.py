"""The validation part, and the statistics of channels."""

import numpy as np
import pytest
import torch

from cifar_lit.data.image_set import channel_statistics, split_validation
from cifar_lit.errors import UsageError

BALANCED = torch.arange(1000) % 10


@pytest.mark.parametrize(("val_size", "expected"), [(100, 100), (0.1, 100), (1, 1), (999, 999), (1 / 3, 333), (0, 0)])
def test_the_parts_are_disjoint_complete_ascending_and_of_exactly_the_size(val_size: float, expected: int) -> None:
    labels = torch.from_numpy(np.random.default_rng(0).choice(4, size=1000, p=(0.7, 0.2, 0.07, 0.03)))
    train, val = split_validation(labels, val_size, seed=5)
    assert len(val) == expected and torch.equal(torch.cat([train, val]).sort().values, torch.arange(1000))
    assert all(part.dtype == torch.int64 and (part.diff() > 0).all() for part in (train, val))
    exact = torch.bincount(labels, minlength=4) * (len(val) / 1000)  # each class's share
    assert (torch.bincount(labels[val], minlength=4) - exact).abs().max() < 1


def test_classes_with_the_largest_remainders_give_the_images_that_are_left() -> None:
    """Of 10 images, classes of 67, 22 and 11 % are due 6.7, 2.2 and 1.1."""
    labels = torch.tensor([0] * 67 + [1] * 22 + [2] * 11)
    assert torch.bincount(labels[split_validation(labels, 10, seed=0)[1]]).tolist() == [7, 2, 1]


def test_the_split_is_a_function_of_the_seed() -> None:
    first, again, other = (split_validation(BALANCED, 100, seed)[1] for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.bincount(BALANCED[first]).tolist() == [10] * 10
    assert first[:5].tolist() == [19, 23, 27, 29, 45]  # and never changes


@pytest.mark.parametrize(
    ("val_size", "advice"), [(-1, "-1 must leave some"), (1000, "1000 images"), (1001, "1000 images"), (0.0001, "is none")]
)
def test_sizes_that_leave_nothing_on_either_side_are_refused(val_size: float, advice: str) -> None:
    with pytest.raises(UsageError, match=advice):
        split_validation(BALANCED, val_size, seed=0)


@pytest.mark.parametrize("channels", [1, 3])
def test_channel_statistics_are_numpys_over_the_chosen_images(channels: int) -> None:
    rng = np.random.default_rng(0)
    images = (rng.random((3000, 5, 4, channels)) * np.linspace(80, 255, channels)).astype(np.uint8)
    chosen = np.flatnonzero(rng.random(3000) < 0.8)
    mean, std = channel_statistics(torch.from_numpy(images), torch.from_numpy(chosen))
    expected = images[chosen].reshape(-1, channels) / 255
    np.testing.assert_allclose(mean, expected.mean(0), atol=6e-5)
    np.testing.assert_allclose(std, expected.std(0), atol=6e-5)
    assert [round(x, 4) for x in (*mean, *std)] == [*mean, *std]
    few = channel_statistics(torch.from_numpy(images), torch.from_numpy(chosen), most=6)[0]
    np.testing.assert_allclose(few, expected[: 6 * 20].mean(0), atol=6e-5)
    assert min(channel_statistics(torch.full((10, 2, 2, 3), 77, dtype=torch.uint8), torch.arange(10))[1]) > 0
