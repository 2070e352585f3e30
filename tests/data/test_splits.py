import numpy as np
import pytest
import torch

from cifar_lit.data.image_set import channel_statistics, split_validation
from cifar_lit.errors import UsageError


def balanced(count: int, classes: int) -> torch.Tensor:
    return torch.arange(count) % classes


def unbalanced(count: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).choice(4, size=count, p=(0.7, 0.2, 0.07, 0.03)))


@pytest.mark.parametrize(
    ("val_size", "expected"), [(5000, 5000), (0.1, 5000), (0.5, 25_000), (1, 1), (49_999, 49_999), (7, 7), (1 / 3, 16_667)]
)
def test_the_validation_part_has_exactly_the_wanted_size(val_size: float, expected: int) -> None:
    train, val = split_validation(balanced(50_000, 10), val_size, seed=0)
    assert len(val) == expected
    assert len(train) == 50_000 - expected


def test_of_cifars_labels_every_class_gives_five_hundred_to_the_validation() -> None:
    labels = balanced(50_000, 10)[torch.randperm(50_000, generator=torch.Generator().manual_seed(1))]
    train, val = split_validation(labels, 5000, seed=3)
    assert torch.bincount(labels[val]).tolist() == [500] * 10
    assert torch.bincount(labels[train]).tolist() == [4500] * 10


@pytest.mark.parametrize("val_size", [1, 10, 0.2, 0.37, 333, 999])
def test_classes_of_unequal_size_give_their_share_to_within_one_image(val_size: float) -> None:
    labels = unbalanced(1000)
    train, val = split_validation(labels, val_size, seed=0)
    exact = torch.bincount(labels, minlength=4) * (len(val) / 1000)
    assert (torch.bincount(labels[val], minlength=4) - exact).abs().max() < 1
    assert len(train) + len(val) == 1000


def test_classes_with_the_largest_remainders_give_the_images_that_are_left() -> None:
    """Of 10 images, classes of 67, 22 and 11 % are due 6.7, 2.2 and 1.1."""
    labels = torch.tensor([0] * 67 + [1] * 22 + [2] * 11)
    assert torch.bincount(labels[split_validation(labels, 10, seed=0)[1]]).tolist() == [7, 2, 1]


def test_the_parts_are_disjoint_complete_and_in_ascending_order() -> None:
    train, val = split_validation(unbalanced(1003), 0.1, seed=5)
    assert torch.equal(torch.cat([train, val]).sort().values, torch.arange(1003))
    for part in (train, val):
        assert part.dtype == torch.int64
        assert (part.diff() > 0).all()


def test_the_split_is_a_function_of_the_seed_and_a_size_of_nought_trains_on_all() -> None:
    labels = balanced(1000, 10)
    first, again, other = (split_validation(labels, 100, seed)[1] for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    train, val = split_validation(labels, 0, seed=0)
    assert torch.equal(train, torch.arange(1000)) and not len(val)


@pytest.mark.parametrize(
    ("val_size", "advice"), [(-1, "-1 must leave some"), (30, "30 images"), (31, "30 images"), (0.01, "is none")]
)
def test_sizes_that_leave_nothing_on_either_side_are_refused(val_size: float, advice: str) -> None:
    with pytest.raises(UsageError, match=advice):
        split_validation(balanced(30, 3), val_size, seed=0)


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


def test_images_that_are_not_chosen_do_not_count_in_the_statistics() -> None:
    images = torch.zeros(10, 2, 2, 1, dtype=torch.uint8)
    images[5:] = 255
    assert channel_statistics(images, torch.arange(5))[0] == [0.0]
    assert channel_statistics(images, torch.arange(10), most=6)[0] == [round(1 / 6, 4)]


def test_images_of_one_colour_have_a_deviation_above_nought() -> None:
    images = torch.full((10, 2, 2, 3), 77, dtype=torch.uint8)
    assert min(channel_statistics(images, torch.arange(10))[1]) > 0
