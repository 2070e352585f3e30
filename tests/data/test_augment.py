"""Orders and random draws by (seed, epoch), and their effect on images, against PIL and torchvision."""

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageOps
from torchvision.transforms.v2 import functional as oracle

from cifar_lit.data.augment import Augmentation, augment_batch
from cifar_lit.data.order import epoch_order
from cifar_lit.data.preprocessing import normalise
from cifar_lit.errors import UsageError
from cifar_lit.features.balanced import balanced_order


@pytest.fixture
def images():
    return torch.randint(0, 256, (40, 9, 7, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def moved_by_pil(image, dy, dx, flip, crop):
    """Return one image (H, W, C), cropped and flipped by PIL."""
    height, width, channels = image.shape
    padded = np.pad(image.numpy(), ((crop, crop), (crop, crop), (0, 0)), mode="reflect")
    box = (crop + dx, crop + dy, crop + dx + width, crop + dy + height)
    window = Image.fromarray(padded.squeeze() if channels == 1 else padded).crop(box)
    return torch.from_numpy(np.array(ImageOps.mirror(window) if flip else window)).view(height, width, channels)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("crop", [0, 1, 4, 6])
def test_every_crop_offset_with_and_without_a_flip_equals_pil(images, crop, channels):
    offsets = range(-crop, crop + 1)
    moves = [(dy, dx, flip, 0, 0) for dy, dx, flip in product(offsets, offsets, (0, 1))]
    source = images[torch.arange(len(moves)) % 40][..., :channels].contiguous()
    rows = torch.arange(len(moves)).flip(0)
    batch = augment_batch(source, rows, torch.tensor(moves, dtype=torch.int32))
    for row, image in zip(rows.tolist(), batch, strict=True):
        assert torch.equal(image, moved_by_pil(source[row], *moves[row][:3], crop)), moves[row]


@pytest.mark.parametrize("side", [1, 2, 5, 6])
def test_a_cutout_at_every_position_equals_a_pil_rectangle(images, side):
    places = list(product(range(9), range(7)))
    moves = [((row + column) % 3 - 1, column % 3 - 1, row % 2, row, column) for row, column in places]
    source, fill = images[torch.arange(len(moves)) % 40], torch.tensor([7, 0, 255], dtype=torch.uint8)
    batch = augment_batch(source, torch.arange(len(moves)), torch.tensor(moves, dtype=torch.int32), side, fill)
    for image, moved, (dy, dx, flip, row, column) in zip(source, batch, moves, strict=True):
        expected = Image.fromarray(moved_by_pil(image, dy, dx, flip, 1).numpy())
        top, left = row - side // 2, column - side // 2
        ImageDraw.Draw(expected).rectangle((left, top, left + side - 1, top + side - 1), fill=(7, 0, 255))
        assert torch.equal(moved, torch.from_numpy(np.array(expected))), (row, column)


def test_every_valid_crop_shift_and_cutout_position_is_drawn():
    plan = Augmentation(crop=2, cutout=4).plan(5000, 9, 7, seed=0, epoch=0)
    for column in (0, 1):
        counts = np.unique(plan[:, column].numpy(), return_counts=True)
        assert counts[0].tolist() == [-2, -1, 0, 1, 2] and counts[1].min() > 850
    assert {tuple(place) for place in plan[:, 3:].tolist()} == set(product(range(9), range(7)))
    assert Augmentation().plan(40, 9, 7, seed=0, epoch=0) is None


def test_alternating_flips_mirror_the_images_of_the_epoch_before(images):
    augmentation = Augmentation(flip="alternating")
    plans = [augmentation.plan(40, 9, 7, seed=2, epoch=epoch) for epoch in range(5)]
    epochs = [augment_batch(images, torch.arange(40), plan) for plan in plans]
    for before, after in pairwise(epochs):
        assert torch.equal(after, before.flip(2))
    assert 8 < sum(not torch.equal(now, image) for now, image in zip(epochs[0], images, strict=True)) < 32
    assert not torch.equal(*(augmentation.plan(40, 9, 7, seed=seed, epoch=0)[:, 2] for seed in (2, 3)))


def test_random_flips_differ_between_epochs():
    flips = [Augmentation(flip="random").plan(10_000, 8, 8, seed=0, epoch=epoch)[:, 2] for epoch in range(3)]
    for first, second in ((0, 1), (1, 2), (0, 2)):
        assert 4800 < flips[first].sum() < 5200
        assert 4800 < (flips[first] == flips[second]).sum() < 5200


def test_normalise_equals_torchvision_and_returns_channels_last(images):
    mean, std = torch.tensor([0.1, 0.5, 0.9]), torch.tensor([0.2, 0.3, 0.4])
    result = normalise(images, mean, std)
    expected = oracle.normalize(images.permute(0, 3, 1, 2).float() / 255, mean.tolist(), std.tolist())
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert result.is_contiguous(memory_format=torch.channels_last)


def test_each_seed_and_epoch_has_its_own_order_and_plan():
    """If they depended on seed + epoch, one seed would repeat the epochs of the next seed."""
    augmentation, pairs = Augmentation(crop=4, flip="random", cutout=5), list(product(range(4), range(4)))
    orders = [epoch_order(100, seed, epoch) for seed, epoch in pairs]
    plans = [augmentation.plan(100, 32, 32, seed, epoch) for seed, epoch in pairs]
    assert all(torch.equal(order.sort().values, torch.arange(100)) for order in orders)
    for drawn in (orders, plans):
        assert len({tuple(values.flatten().tolist()) for values in drawn}) == len(pairs)
    assert torch.equal(orders[6], epoch_order(100, seed=1, epoch=2))
    assert torch.equal(plans[6], augmentation.plan(100, 32, 32, seed=1, epoch=2))


@pytest.mark.parametrize("counts", [[50, 7, 1], [3, 0, 4, 10], [9, 9], [4], [1, 40, 1, 1]])
def test_a_balanced_order_shows_classes_and_their_images_equally_often(counts):
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]
    orders = [balanced_order(labels, seed=3, epoch=epoch) for epoch in range(7)]
    for shown in (*orders, torch.cat(orders)):
        counts = torch.bincount(shown, minlength=len(labels))
        by_class = [counts[labels == label] for label in labels.unique()]
        totals = [int(per_image.sum()) for per_image in by_class]
        assert max(totals) - min(totals) <= 1
        assert all(per_image.max() - per_image.min() <= 1 for per_image in by_class)
    assert {len(order) for order in orders} == {len(labels)}


def test_a_balanced_order_depends_on_seed_and_epoch_and_mixes_the_classes():
    labels = torch.arange(100) % 2
    orders = {(seed, epoch): balanced_order(labels, seed, epoch) for seed, epoch in product(range(3), range(3))}
    assert len({tuple(order.tolist()) for order in orders.values()}) == 9
    assert torch.equal(balanced_order(labels, 1, 2), orders[1, 2])
    assert all(15 < labels[order[:50]].sum() < 35 for order in orders.values())
    rare = torch.tensor([0] * 90 + [1] * 10)
    shown = torch.cat([balanced_order(rare, 0, epoch) for epoch in (0, 1)])
    assert set(shown.tolist()) == set(range(100))  # all images of the common class, over two epochs


def test_invalid_settings_and_a_crop_or_cutout_as_large_as_the_image_are_refused():
    for settings in ({"crop": -1}, {"cutout": -2}, {"flip": "randon"}):
        with pytest.raises(UsageError):
            Augmentation(**settings)
    for setting, (height, width) in product(("crop", "cutout"), ((8, 20), (20, 8))):
        with pytest.raises(UsageError, match=rf"data\.{setting} 8 .* use less than 8"):
            Augmentation(**{setting: 8}).check(height, width)
        Augmentation(**{setting: 7}).check(height, width)
