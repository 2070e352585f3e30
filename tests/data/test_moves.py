"""Orders of an epoch, and flip, crop and cutout: their draws, and their effect on images, against PIL."""

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from cifar_lit.base.errors import UsageError
from cifar_lit.data.augment import Augment, cut_out, flip_and_shift


@pytest.fixture
def images():
    return torch.randint(0, 256, (40, 9, 7, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def moved_by_pil(image, flip, dy, dx, crop):
    """Return one image (H, W, C), flipped and cropped by PIL."""
    height, width, channels = image.shape
    flipped = image.numpy()[:, ::-1] if flip else image.numpy()
    padded = np.pad(flipped, ((crop, crop), (crop, crop), (0, 0)), mode="reflect")
    box = (crop + dx, crop + dy, crop + dx + width, crop + dy + height)
    window = Image.fromarray(padded.squeeze() if channels == 1 else padded).crop(box)
    return torch.from_numpy(np.array(window)).view(height, width, channels)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("crop", [0, 1, 4, 6])
def test_every_crop_offset_with_and_without_a_flip_equals_pil(images, crop, channels):
    offsets = range(-crop, crop + 1)
    moves = list(product((0, 1), offsets, offsets))
    source = images[torch.arange(len(moves)) % 40][..., :channels].contiguous()
    rows = torch.arange(len(moves)).flip(0)
    batch = flip_and_shift(source, rows, *torch.tensor(moves)[rows].unbind(1))
    for row, image in zip(rows.tolist(), batch, strict=True):
        assert torch.equal(image, moved_by_pil(source[row], *moves[row], crop)), moves[row]


@pytest.mark.parametrize("side", [1, 2, 5, 6])
def test_a_cutout_at_every_position_equals_a_pil_rectangle(images, side):
    places = list(product(range(9), range(7)))
    source, fill = images[torch.arange(len(places)) % 40], torch.tensor([7, 0, 255], dtype=torch.uint8)
    batch = cut_out(source, *torch.tensor(places).unbind(1), side, fill)
    for image, painted, (row, column) in zip(source, batch, places, strict=True):
        expected = Image.fromarray(image.numpy())
        top, left = row - side // 2, column - side // 2
        ImageDraw.Draw(expected).rectangle((left, top, left + side - 1, top + side - 1), fill=(7, 0, 255))
        assert torch.equal(painted, torch.from_numpy(np.array(expected))), (row, column)


COUNT = 30_000
PLACES = torch.arange(9 * 7).view(1, 9, 7, 1).to(torch.uint8)  # one image whose levels are its positions


def looks(seed, epoch, count=COUNT, **settings):
    """Return the image PLACES as augmented in `count` rows, with cutouts in level 255: (count, 9, 7)."""
    augment, images = Augment(**settings), PLACES.expand(count, -1, -1, -1).contiguous()
    keys = augment.move_keys(9, 7, seed, epoch)
    return augment.move(images, torch.arange(count), keys, torch.tensor([255], dtype=torch.uint8))[..., 0]


def deviation(numbers, others=None):
    """Return the chi-square statistic of uniform, independent values, in standard deviations from its mean."""
    _, cells = numbers.unique(return_inverse=True)
    if others is not None:
        _, other_cells = others.unique(return_inverse=True)
        cells = cells * (int(other_cells.max()) + 1) + other_cells
    counts = torch.bincount(cells).double()
    expected, freedom = len(cells) / len(counts), len(counts) - 1
    return float(((counts - expected).square().sum() / expected - freedom) / (2 * freedom) ** 0.5)


@pytest.mark.parametrize("seed", [0, 1, 12_345])
def test_draws_of_rows_epochs_seeds_and_settings_are_independent(seed):
    settings = {"crop": 1, "flip": "random"}
    drawn = looks(seed, 3, **settings)[:, 4, 5]  # one level for each of 18 moves
    assert len(drawn.unique()) == 18
    others = {
        "next row": drawn.roll(1),
        "far row": drawn.roll(4096),
        "epoch": looks(seed, 4, **settings)[:, 4, 5],
        "seed": looks(seed + 1, 3, **settings)[:, 4, 5],
        "seed and epoch swapped": looks(3, seed, **settings)[:, 4, 5],
        "cutout": (looks(seed, 3, cutout=1) == 255).flatten(1).int().argmax(1),
    }
    for name, values in others.items():
        assert abs(deviation(drawn, values)) < 4, name


def test_alternating_flips_mirror_the_images_of_the_epoch_before():
    epochs = [looks(2, epoch, 1000, flip="alternating") for epoch in range(5)]
    for before, after in pairwise(epochs):
        assert torch.equal(after, before.flip(2))
    assert 430 < int((epochs[0][:, 0, 0] > 0).sum()) < 570
    assert not torch.equal(epochs[0], looks(3, 0, 1000, flip="alternating"))


def test_a_crop_or_cutout_as_large_as_the_image_is_refused():
    for setting, (height, width) in product(("crop", "cutout"), ((8, 20), (20, 8))):
        with pytest.raises(UsageError, match=rf"data\.augment\.{setting} 8 is too large"):
            Augment(**{setting: 8}).check(height, width)
        Augment(**{setting: 7}).check(height, width)
