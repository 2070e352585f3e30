"""`Preprocessing` alone: batches from uint8 images to what a net is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cifar_lit.data.batch import Batch
from cifar_lit.data.device_augment import DeviceAugmentation
from cifar_lit.data.preprocessing import Preprocessing
from cifar_lit.data.sources import SourceSettings
from cifar_lit.data.split_images import SplitImages
from cifar_lit.errors import UsageError


def preprocessing(**settings: Any) -> Preprocessing:
    parts = SplitImages("shapes", SourceSettings(image_size=8, count=40), val_size=10)
    return Preprocessing(parts, **{"mean": 0.5, "std": 0.25, **settings})


def batch_of(steps: Preprocessing, epoch: int = 0) -> Batch:
    rows, images = torch.arange(3, 11), steps.parts.train_images
    return Batch(images.take(rows), images.labels[rows], rows, epoch=epoch)


def test_without_augmentation_training_and_evaluation_batches_are_normalised_alike() -> None:
    steps = preprocessing()
    batch = batch_of(steps)
    expected = (batch.images.permute(0, 3, 1, 2) / 255 - 0.5) / 0.25
    for result in (steps.train_batch(batch), steps.eval_batch(batch)):
        torch.testing.assert_close(result.images, expected)
        assert result.labels is batch.labels and result.targets is None
    assert steps.train_batch(batch, side=4).images.shape[2:] == (4, 4)


def test_an_image_is_augmented_as_a_function_of_seed_epoch_and_row() -> None:
    steps, other = (preprocessing(augmentation=DeviceAugmentation(hue=0.4), seed=seed) for seed in (0, 1))
    batch = batch_of(steps, epoch=2)
    shown = steps.train_batch(batch).images
    assert torch.equal(steps.train_batch(batch_of(steps, epoch=2)).images, shown)
    half = Batch(batch.images[4:], batch.labels[4:], batch.indices[4:], epoch=2)
    torch.testing.assert_close(steps.train_batch(half).images, shown[4:])
    for different in (steps.train_batch(batch_of(steps, epoch=3)), other.train_batch(batch)):
        assert not torch.equal(different.images, shown)
    assert torch.equal(steps.eval_batch(batch).images, preprocessing().eval_batch(batch).images)


def test_mixed_images_have_targets() -> None:
    steps = preprocessing(augmentation=DeviceAugmentation(mixup=1.0))
    targets = steps.train_batch(batch_of(steps)).targets
    assert targets is not None and targets.shape == (8, 10)
    torch.testing.assert_close(targets.sum(1), torch.ones(8))


def test_settings_that_do_not_fit_the_size_of_the_images_are_refused() -> None:
    preprocessing(resolutions={4: 0.5}).check()
    with pytest.raises(UsageError, match="a side of 12 pixels: use 4 … 8"):
        preprocessing(resolutions={12: 0.5}).check()
    with pytest.raises(UsageError, match=r"data\.augment\.blur"):
        preprocessing(augmentation=DeviceAugmentation(blur=50.0)).check()
