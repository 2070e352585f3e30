"""`data.augment`: random draws, independence of the batch, mixing, and the place in the pipeline."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from small_data import shapes_data, trainer_at
from torch import Tensor

from cifar_lit.base.errors import UsageError
from cifar_lit.data.augment import TRANSFORMS, TRIES, Augment, crop_boxes, resized_crop
from cifar_lit.data.datamodule import ImageData

scaled_data = partial(shapes_data, mean=0.5, std=0.25)


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randint(0, 256, (60, 16, 12, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_crops_have_their_share_and_ratio_and_cover_the_whole_image() -> None:
    draws = torch.rand(4000, 2 * TRIES + 2, generator=torch.Generator().manual_seed(0))
    top, left, rows, columns = crop_boxes(draws, [0.25, 0.6], 32, 48).unbind(1)
    assert float((rows * columns / 32 / 48).min()) > 0.22 and float((rows * columns / 32 / 48).max()) < 0.63
    assert float((columns / rows).min()) > 0.7 and float((columns / rows).max()) < 1.4
    assert (int(top.min()), int(left.min()), int((top + rows).max()), int((left + columns).max())) == (0, 0, 32, 48)
    fallback = crop_boxes(draws[:3], [1, 1], 32, 96)  # no crop fits: the largest central one
    assert fallback.tolist() == [[0, 26, 32, 43]] * 3


def test_a_crop_is_scaled_as_by_interpolate(images: Tensor) -> None:
    box = torch.tensor([[3.0, 2.0, 8.0, 7.0]])
    part = images[:1, 3:11, 2:9].permute(0, 3, 1, 2).float()
    expected = torch.nn.functional.interpolate(part, (16, 12), mode="bilinear").permute(0, 2, 3, 1)
    torch.testing.assert_close(resized_crop(images[:1], box), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", [*TRANSFORMS, "none"])
def test_an_image_is_augmented_alike_in_any_batch_and_differs_between_epochs_and_seeds(
    name: str, images: Tensor
) -> None:
    augment = Augment(transform=name, scale=[0.35, 1] if name == "none" else None)
    rows = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    state = torch.get_rng_state()
    for pixels in (images, images[..., :1].contiguous()):
        whole = augment.change(pixels, torch.arange(60), 0, 0)
        parts = [augment.change(pixels[part], part, 0, 0) for part in rows.split(7)]
        assert torch.equal(torch.cat(parts), whole[rows])
        for other in (augment.change(pixels, torch.arange(60), 0, 1), augment.change(pixels, torch.arange(60), 1, 0)):
            assert float((other != whole).flatten(1).any(1).float().mean()) > 0.5
    assert torch.equal(torch.get_rng_state(), state)  # the draws of a dropout stay as they are


# ---- mixing


def mixed(settings: dict[str, float], rows: Tensor, epoch: int = 0) -> tuple[Tensor, Tensor]:
    """Return mixed images whose pixels equal their label, and their targets."""
    labels = rows % 10
    images = labels.float()[:, None, None, None].expand(-1, 3, 20, 30).contiguous(memory_format=torch.channels_last)
    return Augment(**settings).mix(images, labels, 10, rows, 0, epoch)


@pytest.mark.parametrize("settings", [{"mixup": 1.0}, {"cutmix": 1.0}, {"mixup": 0.4, "cutmix": 1.0}])
def test_targets_are_the_shares_of_the_mixed_images(settings: dict[str, float]) -> None:
    rows = torch.randperm(500, generator=torch.Generator().manual_seed(0))[:200]
    images, targets = mixed(settings, rows)
    torch.testing.assert_close(targets.sum(1), torch.ones(200))
    torch.testing.assert_close(images.mean((1, 2, 3)), targets @ torch.arange(10.0), rtol=0, atol=1e-3)
    own = targets[torch.arange(200), rows % 10]
    assert float(own.min()) < 0.3 and float(own.max()) > 0.9
    pasted = (images == images.round()).flatten(1).all(1) & (own < 1)
    blended = (own < 1) & ~pasted
    assert 0.35 < float(pasted.float().mean()) < 0.65 or len(settings) == 1
    assert bool(pasted.any()) == ("cutmix" in settings) and bool(blended.any()) == ("mixup" in settings)


def test_each_image_is_mixed_with_one_other_determined_by_the_rows() -> None:
    rows = torch.arange(10)  # one image per class
    _, targets = mixed({"mixup": 1.0}, rows)
    others = targets.masked_fill(torch.eye(10).bool(), 0)
    assert others.count_nonzero(0).tolist() == others.count_nonzero(1).tolist() == [1] * 10
    order = torch.randperm(10, generator=torch.Generator().manual_seed(3))
    assert torch.equal(mixed({"mixup": 1.0}, rows[order])[1], targets[order])
    assert not torch.equal(mixed({"mixup": 1.0}, rows, epoch=1)[1] > 0, targets > 0)


# ---- settings and the pipeline


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"crop": -1}, r"data\.augment\.crop must be 0 or more, not -1"),
        ({"transform": "rand"}, r"data\.augment\.transform must be one of none, trivial_augment_wide, rand_augment"),
        ({"scale": [0.5, 1.5]}, r"data\.augment\.scale must be two rising shares of the area"),
    ],
)
def test_invalid_settings_are_refused_by_name(settings: Any, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        ImageData("shapes", augment=settings)


def at(data: ImageData, epoch: int, training: bool = True) -> ImageData:
    data.trainer = trainer_at(epoch, 4, training, world_size=1)
    data.side = {0: 6, 2: None}.get  # set by the feature resolutions
    return data


def test_training_batches_alone_are_augmented_before_scaling_and_normalising() -> None:
    data = scaled_data(augment={"transform": "colour_jitter"}, seed=3)
    loader = data.train_dataloader()
    loader.set_epoch(2)
    batch = next(iter(loader))
    plain = scaled_data().on_after_batch_transfer(batch, 0).images
    assert torch.equal(at(data, 2, training=False).on_after_batch_transfer(batch, 0).images, plain)
    changed = data.augment.change(batch.images, batch.indices, 3, 2).permute(0, 3, 1, 2)
    result = at(data, 2).on_after_batch_transfer(batch, 0)
    torch.testing.assert_close(result.images, (changed / 255 - 0.5) / 0.25, rtol=0, atol=1e-5)
    assert result.images.is_contiguous(memory_format=torch.channels_last) and result.targets is None
    small = at(data, 0).on_after_batch_transfer(batch, 0).images
    assert small.shape[2:] == (6, 6)
