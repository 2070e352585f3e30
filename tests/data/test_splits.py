"""The validation split, folds, groups that stay together, and channel statistics."""

import numpy as np
import pytest
import torch

from cifar_lit.base.errors import UsageError
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.preprocessing import channel_statistics
from cifar_lit.data.split import fold_rows, split_validation, take_share

BALANCED = torch.arange(1000) % 10


@pytest.mark.parametrize(("val_size", "expected"), [(100, 100), (0.1, 100), (1, 1), (999, 999), (1 / 3, 333), (0, 0)])
def test_the_parts_are_disjoint_complete_sorted_and_of_the_exact_size(val_size: float, expected: int) -> None:
    labels = torch.from_numpy(np.random.default_rng(0).choice(4, size=1000, p=(0.7, 0.2, 0.07, 0.03)))
    train, val = split_validation(labels, val_size, seed=5)
    assert len(val) == expected and torch.equal(torch.cat([train, val]).sort().values, torch.arange(1000))
    assert all(part.dtype == torch.int64 and (part.diff() > 0).all() for part in (train, val))
    exact = torch.bincount(labels, minlength=4) * (len(val) / 1000)  # share of each class
    assert (torch.bincount(labels[val], minlength=4) - exact).abs().max() < 1


def test_the_split_is_a_function_of_the_seed() -> None:
    first, again, other = (split_validation(BALANCED, 100, seed)[1] for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.bincount(BALANCED[first]).tolist() == [10] * 10
    assert first[:5].tolist() == [19, 23, 27, 29, 45]  # the split of a seed never changes


@pytest.mark.parametrize(
    ("val_size", "advice"),
    [(-1, "-1 must leave some"), (1000, "1000 images"), (1001, "1000 images"), (0.0001, "draws no image")],
)
def test_sizes_that_leave_one_part_empty_are_refused(val_size: float, advice: str) -> None:
    with pytest.raises(UsageError, match=advice):
        split_validation(BALANCED, val_size, seed=0)


# ---- groups


def patients(count: int, classes: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return labels and groups of `count` patients with 1 to 20 images each, of one or several classes."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 21, count)
    groups = np.repeat(rng.permutation(count), sizes)
    main = rng.integers(0, classes, count)
    labels = np.where(rng.random(len(groups)) < 0.7, main[groups], rng.integers(0, classes, len(groups)))
    order = rng.permutation(len(groups))
    return torch.from_numpy(labels[order]), torch.from_numpy(groups[order])


def assert_whole(groups: torch.Tensor, side: torch.Tensor) -> None:
    """Assert that every group has a single value of `side`."""
    for group in groups.unique():
        assert len(side[groups == group].unique()) == 1


@pytest.mark.parametrize("val_size", [0.05, 0.2, 0.5, 300])
def test_a_validation_set_of_whole_groups_is_near_the_requested_size_and_stratified(val_size: float) -> None:
    labels, groups = patients(200, 4)
    for seed in range(3):
        train, val = split_validation(labels, val_size, seed, groups)
        assert torch.equal(torch.cat([train, val]).sort().values, torch.arange(len(labels)))
        assert_whole(groups, torch.isin(torch.arange(len(labels)), val))
        share = val_size if val_size < 1 else val_size / len(labels)
        counts = torch.bincount(labels[val], minlength=4) / torch.bincount(labels)
        assert (counts - share).abs().max() < 0.03
    assert not torch.equal(val, split_validation(labels, val_size, 0, groups)[1])
    assert torch.equal(val, split_validation(labels, val_size, seed, groups)[1])


def test_every_class_keeps_training_images_and_has_validation_images_if_possible() -> None:
    labels = torch.tensor([0] * 30 + [1] * 8 + [2] * 4)
    groups = torch.tensor([row // 3 for row in range(30)] + [100] * 5 + [101] * 3 + [102] * 4)
    train, val = split_validation(labels, 0.25, 0, groups)
    assert torch.bincount(labels[train]).tolist() == [24, 5, 4] and torch.bincount(labels[val]).tolist() == [6, 3]
    train, val = split_validation(labels, 0.9, 0, groups)
    assert labels[train].unique().tolist() == [0, 1, 2]
    with pytest.raises(UsageError, match="of 42 images draws no image or group"):
        split_validation(labels, 0.25, 0, labels)


def test_folds_are_as_equal_as_possible_in_every_class() -> None:
    labels = torch.from_numpy(np.random.default_rng(0).choice(4, size=1003, p=(0.7, 0.2, 0.07, 0.03)))
    folds = fold_rows(labels, None, 5, seed=1)
    assert folds.dtype == torch.int64
    table = torch.stack([torch.bincount(labels[folds == fold], minlength=4) for fold in range(5)])
    assert (table.max(0).values - table.min(0).values).max() <= 1 and table.sum(1).max() - table.sum(1).min() <= 1
    assert torch.equal(folds, fold_rows(labels, None, 5, seed=1))
    assert not torch.equal(folds, fold_rows(labels, None, 5, seed=2))


def test_folds_keep_groups_together_and_are_nearly_stratified() -> None:
    labels, groups = patients(200, 4)
    folds = fold_rows(labels, groups, 5, seed=0)
    assert_whole(groups, folds)
    table = torch.stack([torch.bincount(labels[folds == fold], minlength=4) for fold in range(5)])
    assert (table / torch.bincount(labels) - 0.2).abs().max() < 0.02


def test_a_share_of_the_training_images_has_whole_groups() -> None:
    labels, groups = patients(200, 4)
    rows = torch.arange(len(labels))[::2]
    images = ImageSet(torch.zeros(len(labels), 1, 1, 1, dtype=torch.uint8), labels, (*"abcd",), groups=groups)
    taken = take_share(images, rows, 0.3, seed=0)
    assert_whole(groups[rows], torch.isin(rows, taken))
    assert abs(len(taken) / len(rows) - 0.3) < 0.03


def as_set(images: torch.Tensor) -> ImageSet:
    return ImageSet(images, torch.zeros(len(images), dtype=torch.int64), ("all",))


@pytest.mark.parametrize("channels", [1, 3])
def test_channel_statistics_equal_numpys_over_the_selected_images(
    channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    images = (rng.random((3000, 5, 4, channels)) * np.linspace(80, 255, channels)).astype(np.uint8)
    selected = np.flatnonzero(rng.random(3000) < 0.8)
    whole = as_set(torch.from_numpy(images))
    mean, std = channel_statistics(whole, torch.from_numpy(selected))
    expected = images[selected].reshape(-1, channels) / 255
    np.testing.assert_allclose(mean, expected.mean(0), atol=6e-5)
    np.testing.assert_allclose(std, expected.std(0), atol=6e-5)
    assert [round(x, 4) for x in (*mean, *std)] == [*mean, *std]
    monkeypatch.setattr("cifar_lit.data.preprocessing.MEASURED", 6)
    few = channel_statistics(whole, torch.from_numpy(selected))[0]
    spread = selected[np.arange(6) * len(selected) // 6]  # evenly, because folders are sorted by class
    np.testing.assert_allclose(few, (images[spread] / 255).mean((0, 1, 2)), atol=6e-5)


def test_a_constant_channel_has_the_mean_deviation_of_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    rows, images = torch.arange(10), torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1).repeat(1, 1, 1, 3)
    assert channel_statistics(as_set(images // 5), rows)[1] == [0.002] * 3  # two levels in every channel
    images[..., 0] *= 20
    images[..., 1] = 77
    images[..., 2] *= 9
    red, green, blue = channel_statistics(as_set(images), rows)[1]
    assert green == pytest.approx((red + blue) / 2, abs=1e-4) and red > green > blue
    images[..., 2] //= 45  # noise of a grey level
    assert channel_statistics(as_set(images), rows)[1] == [red] * 3
    assert "2 of 3 channels of the training images are constant: they are normalised as" in capsys.readouterr().err
    assert channel_statistics(as_set(torch.full_like(images, 77)), rows)[1] == [0.25] * 3


# ---- several labels


def several(count: int = 1000) -> torch.Tensor:
    """Return labels of 6 classes, from 2 % to 50 % of the images, some of them always together."""
    rng = np.random.default_rng(0)
    labels = rng.random((count, 6)) < (0.5, 0.2, 0.1, 0.05, 0.02, 0)
    labels[:, 5] = labels[:, 3]
    return torch.from_numpy(labels).float()


@pytest.mark.parametrize("val_size", [0.1, 0.5])
def test_each_of_several_labels_gives_its_share_of_validation_images(val_size: float) -> None:
    labels = several()
    train, val = split_validation(labels, val_size, seed=0)
    assert torch.equal(torch.cat([train, val]).sort().values, torch.arange(1000))
    assert abs(len(val) - 1000 * val_size) <= 2
    assert (labels[val].sum(0) - val_size * labels.sum(0)).abs().max() <= 3
    none = ~labels.any(1)
    assert abs(int(none[val].sum()) - val_size * int(none.sum())) <= 2
    other = split_validation(labels, val_size, seed=1)[1]
    assert not torch.equal(val, other) and torch.equal(val, split_validation(labels, val_size, seed=0)[1])


def test_a_label_of_three_images_is_on_both_sides() -> None:
    labels = torch.zeros(60, 2)
    labels[::20, 0] = 1
    labels[5:, 1] = 1
    for seed in range(5):
        _, val = split_validation(labels, 1 / 3, seed)
        assert int(labels[val, 0].sum()) == 1


def test_groups_of_images_with_several_labels_stay_together() -> None:
    labels = several()
    groups = torch.arange(1000) // 4
    _, val = split_validation(labels, 0.2, 0, groups)
    side = torch.zeros(1000)
    side[val] = 1
    assert_whole(groups, side)
    assert abs(len(val) - 200) <= 4 and (labels[val].sum(0) - 0.2 * labels.sum(0)).abs().max() <= 15
    folds = fold_rows(labels, groups, 5, seed=0)
    assert_whole(groups, folds)
    assert (torch.bincount(folds) - 200).abs().max() <= 8


def test_many_rare_labels_give_validation_images_too() -> None:
    labels = torch.eye(50).repeat(4, 1)
    _, val = split_validation(labels, 0.1, seed=0)
    assert len(val) == 20


def test_a_share_of_images_keeps_the_shares_of_several_labels() -> None:
    labels = several()
    images = ImageSet(torch.zeros(1000, 1, 1, 3, dtype=torch.uint8), labels, tuple("abcdef"))
    taken = take_share(images, torch.arange(1000), 0.1, seed=0)
    assert abs(len(taken) - 100) <= 2 and (labels[taken].sum(0) - 0.1 * labels.sum(0)).abs().max() <= 3
