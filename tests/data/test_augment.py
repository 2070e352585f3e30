"""`data.augment`: random draws, independence of the batch, mixing, and the place in the pipeline."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_data import shapes_data, trainer_at
from torch import Tensor

from cifar_lit.data.augment import Augment
from cifar_lit.data.batch import Batch
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.operations import OPERATIONS
from cifar_lit.data.preprocessing import CHUNK_BYTES, Preprocessing
from cifar_lit.errors import UsageError
from cifar_lit.features.capture import batches_of_side
from cifar_lit.features.resolutions import Resolutions
from cifar_lit.runs.figures import augmented_sample

EVERYTHING: dict[str, Any] = {
    "scale": [0.35, 1], "rotation": 15, "perspective": 0.3, "policy": "randaugment", "brightness": 0.4, "contrast": 0.4,
    "saturation": 0.4, "hue": 0.1, "blur": 1.5, "erasing": 0.5,
}  # fmt: skip
FILL = torch.tensor([10.0, 120.0, 250.0])
scaled_data = partial(shapes_data, mean=0.5, std=0.25)


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randint(0, 256, (60, 16, 12, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def planes(images: Tensor) -> Tensor:
    return images.permute(0, 3, 1, 2)


def augmented(images: Tensor, rows: Tensor, epoch: int = 0, seed: int = 0, **settings: Any) -> Tensor:
    """Return the augmented images of `rows`, float32 (B, C, H, W)."""
    parts: Any = SimpleNamespace(train_images=SimpleNamespace(input_shape=planes(images).shape[1:]))
    mean = (FILL[: images.shape[3]] / 255).tolist()
    preprocessing = Preprocessing(parts, mean=mean, std=1.0, augment=Augment(**settings))
    return preprocessing.augment_images(images[rows], rows, seed, epoch, planes)


def drawn(count: int = 4000, height: int = 32, width: int = 48, **settings: Any) -> dict[str, Tensor]:
    return Augment(**settings).draw(torch.arange(count), 0, 0, height, width)


# ---- random draws


def test_crops_have_their_share_and_ratio_and_cover_the_whole_image() -> None:
    top, left, rows, columns = drawn(scale=[0.25, 0.6], ratio=[0.5, 2])["crop"].unbind(1)
    assert float((rows * columns / 32 / 48).min()) > 0.22 and float((rows * columns / 32 / 48).max()) < 0.63
    assert float((columns / rows).min()) > 0.45 and float((columns / rows).max()) < 2.2
    assert (int(top.min()), int(left.min()), int((top + rows).max()), int((left + columns).max())) == (0, 0, 32, 48)
    fallback = drawn(3, scale=[1, 1], ratio=[1, 1])["crop"]  # no crop fits: the largest centred square
    assert fallback.tolist() == [[0, 8, 32, 32]] * 3


def test_parameters_are_uniform_in_torchvisions_ranges() -> None:
    values = drawn(brightness=0.4, contrast=2, saturation=0.1, hue=0.2, rotation=30, blur=2)
    ranges: dict[str, Any] = {"brightness": (0.6, 1.4), "contrast": (0, 3), "saturation": (0.9, 1.1)}
    for name, (least, most) in {**ranges, "hue": (-0.2, 0.2), "blur": (0, 2), "rotation": (-30, 30)}.items():
        shares = (values[name] - least) / (most - least)
        assert 0 <= float(shares.min()) < 0.01 and 0.99 < float(shares.max()) <= 1, name
        assert abs(float(shares.mean()) - 0.5) < 0.02, name


def test_corners_move_inward_and_erasing_has_its_probability() -> None:
    values = drawn(perspective=0.5, erasing=0.25)
    inward = (values["perspective"] - torch.tensor([[0, 0], [47, 0], [47, 31], [0, 31]])).abs()
    assert inward.amax((0, 1)).tolist() == [12, 8] and inward.amin((0, 1)).tolist() == [0, 0]
    top, left, rows, columns = values["erasing"][values["erasing"][:, 2] > 0].unbind(1)
    assert 900 < len(top) < 1100
    assert float((rows * columns).min()) > 0.015 * 32 * 48 and float((rows * columns).max()) < 0.35 * 32 * 48
    assert float((top + rows).max()) <= 32 and float((left + columns).max()) <= 48


def test_policies_draw_all_operations_magnitudes_and_signs() -> None:
    trivial = drawn(policy="trivial", operations=3)
    assert trivial["operations"].shape == (4000, 1)
    counts = torch.bincount(trivial["operations"][:, 0], minlength=14)
    assert int(counts.min()) > 210 and int(counts.max()) < 360
    turns = trivial["magnitudes"][trivial["operations"] == 5]
    assert len(turns.unique()) > 45 and (float(turns.min()), float(turns.max())) == (-135, 135)
    several = drawn(policy="randaugment", operations=3, magnitude=30)
    assert several["operations"].shape == (4000, 3)
    assert several["magnitudes"][several["operations"] == 5].unique().tolist() == [-30, 30]
    assert several["magnitudes"][several["operations"] == 10].unique().tolist() == [4]  # bits


@pytest.mark.parametrize("policy", ["trivial", "randaugment"])
def test_signs_are_drawn_for_the_operations_that_torchvision_negates(policy: str) -> None:
    parameters = drawn(policy=policy, operations=2, magnitude=20)
    names = tuple(OPERATIONS)
    negative = {names[number] for number in parameters["operations"][parameters["magnitudes"] < 0].tolist()}
    positive = {names[number] for number in parameters["operations"][parameters["magnitudes"] > 0].tolist()}
    moves = {"ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"}
    assert negative == moves | {"Brightness", "Color", "Contrast", "Sharpness"}
    assert positive >= negative


def test_the_draws_of_a_setting_do_not_depend_on_other_settings() -> None:
    everything = drawn(50, **EVERYTHING)
    for name in ("scale", "rotation", "perspective", "brightness", "hue", "blur", "erasing"):
        for key, values in drawn(50, **{name: EVERYTHING[name]}).items():
            assert torch.equal(values, everything[key]), key
    assert len({tuple(everything[name].flatten().tolist()) for name in ("brightness", "contrast", "saturation")}) == 3


# ---- augmented images


def test_an_image_is_augmented_alike_in_any_batch_and_differs_between_epochs_and_seeds(images: Tensor) -> None:
    rows = torch.arange(60)
    whole, order = augmented(images, rows, **EVERYTHING), torch.randperm(60, generator=torch.Generator().manual_seed(1))
    parts = torch.cat([augmented(images, part, **EVERYTHING) for part in rows.split(7)])
    for same in (augmented(images, rows[order], **EVERYTHING)[order.argsort()], parts):
        assert float(((same - whole).abs() > 0.01).float().mean()) < 1e-3  # rounding may change a level
    for other in (augmented(images, rows, epoch=1, **EVERYTHING), augmented(images, rows, seed=1, **EVERYTHING)):
        assert float((other - whole).abs().amax((1, 2, 3)).gt(1).float().mean()) > 0.9


def test_a_batch_of_several_chunks_keeps_its_order() -> None:
    side = 64
    images = torch.randint(0, 256, (2 * CHUNK_BYTES // (4 * 3 * side * side) + 3, side, side, 3), dtype=torch.uint8)
    rows = torch.arange(len(images)).flip(0)
    settings: dict[str, Any] = {"policy": "trivial", "erasing": 1.0}
    assert torch.equal(augmented(images, rows, **settings)[-1], augmented(images, rows[-1:], **settings)[0])
    dark = images // 3  # no level is clipped: the factor of each image can be read from its levels
    levels = augmented(dark, rows, brightness=0.5).mean((1, 2, 3)) / planes(dark[rows]).float().mean((1, 2, 3))
    alone = [augmented(dark, row[None], brightness=0.5).mean() / dark[row].float().mean() for row in rows[::97]]
    torch.testing.assert_close(levels[::97], torch.stack(alone), rtol=0, atol=1e-3)
    assert 0.5 <= float(levels.min()) < 0.52 and 1.48 < float(levels.max()) <= 1.501


def test_grey_images_are_augmented(images: Tensor) -> None:
    rows, grey = torch.arange(60), images[..., :1].contiguous()
    result = augmented(grey, rows, **EVERYTHING)
    assert result.shape == (60, 1, 16, 12) and float(result.min()) >= 0 and float(result.max()) <= 255.01


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
    assert images.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(targets.sum(1), torch.ones(200))
    torch.testing.assert_close(images.mean((1, 2, 3)), targets @ torch.arange(10.0), rtol=0, atol=1e-3)
    own = targets[torch.arange(200), rows % 10]
    assert float(own.min()) < 0.3 and float(own.max()) > 0.9
    pasted = (images == images.round()).flatten(1).all(1) & (own < 1)
    blended = (own < 1) & ~pasted
    assert 0.35 < float(pasted.float().mean()) < 0.65 or len(settings) == 1
    assert bool(pasted.any()) == ("cutmix" in settings) and bool(blended.any()) == ("mixup" in settings)


@pytest.mark.parametrize("alpha", [0.3, 1.0, 5.0])
def test_shares_are_drawn_from_a_beta_distribution_of_alpha(alpha: float) -> None:
    rows = torch.arange(5000)
    share = mixed({"mixup": alpha}, rows)[1][rows, rows % 10]
    share = share[share < 1]  # without partners of the same class
    assert float(share.var()) == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.06)


def test_each_image_is_mixed_with_one_other_determined_by_the_rows() -> None:
    rows = torch.arange(10)  # one image per class
    _, targets = mixed({"mixup": 1.0}, rows)
    others = targets.masked_fill(torch.eye(10).bool(), 0)
    assert others.count_nonzero(0).tolist() == others.count_nonzero(1).tolist() == [1] * 10
    order = torch.randperm(10, generator=torch.Generator().manual_seed(3))
    assert torch.equal(mixed({"mixup": 1.0}, rows[order])[1], targets[order])
    assert not torch.equal(mixed({"mixup": 1.0}, rows, epoch=1)[1] > 0, targets > 0)
    assert mixed({"cutmix": 1.0}, rows[:1])[1].tolist() == [[1.0] + [0.0] * 9]  # a single image is mixed with itself


# ---- settings


def test_settings_of_a_policy_compute_nothing_without_a_policy() -> None:
    assert not Augment(flip="random", crop=2, cutout=3, operations=3, magnitude=5).computes
    assert Augment(policy="randaugment").computes and Augment(blur=0.5).computes


@pytest.mark.parametrize("settings", [5, "crop", [2]])
def test_augmentation_that_is_no_mapping_is_refused(settings: Any) -> None:
    with pytest.raises(UsageError, match=r"data\.augment must hold settings by name, not "):
        ImageData("shapes", augment=settings)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"brightness": -0.1}, r"data\.augment\.brightness must be a number from 0 to 4, not -0\.1"),
        ({"contrast": "strong"}, r"data\.augment\.contrast must be a number from 0 to 4, not 'strong'"),
        ({"saturation": True}, r"data\.augment\.saturation must be a number"),
        ({"mixup": float("nan")}, r"data\.augment\.mixup must be a number"),
        ({"erasing": None}, r"data\.augment\.erasing must be a number"),
        ({"operations": 1.5}, r"data\.augment\.operations must be a whole number from 1 to 8, not 1\.5"),
        (
            {"policy": "rand"},
            r"data\.augment\.policy must be one of none, trivial, randaugment, not 'rand'\. Did you mean rand",
        ),
        (
            {"scale": 0.5},
            r"data\.augment\.scale must be two rising shares of the area, above 0 and up to 1, such as .*, not 0\.5",
        ),
        ({"scale": [0.5, 1.5]}, r"data\.augment\.scale must be two rising shares"),
        ({"ratio": [2, 1]}, r"data\.augment\.ratio must be two rising numbers above 0"),
        ({"ratio": [1, 2]}, r"data\.augment\.ratio needs a random crop: set data\.augment\.scale too"),
    ],
)
def test_invalid_settings_are_refused_by_name(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        ImageData("shapes", augment=settings)


# ---- in the pipeline


def at(data: ImageData, epoch: int, training: bool = True) -> ImageData:
    data.trainer = trainer_at(epoch, 4, training, world_size=1, callbacks=[Resolutions({6: 0.5})])
    return data


def test_training_batches_alone_are_augmented_before_scaling_and_normalising() -> None:
    data = scaled_data(augment={"brightness": 0.5}, seed=3)
    loader = data.train_dataloader()
    loader.set_epoch(2)
    batch = next(iter(loader))
    plain = scaled_data().on_after_batch_transfer(batch, 0).images
    assert torch.equal(at(data, 2, training=False).on_after_batch_transfer(batch, 0).images, plain)
    bright = data.preprocessing.augment_images(batch.images, batch.indices, 3, 2, planes)
    result = at(data, 2).on_after_batch_transfer(batch, 0)
    torch.testing.assert_close(result.images, (bright / 255 - 0.5) / 0.25, rtol=0, atol=1e-5)
    assert result.images.is_contiguous(memory_format=torch.channels_last) and result.targets is None
    small = at(data, 0).on_after_batch_transfer(batch, 0).images
    assert small.shape[2:] == (6, 6)


def test_settings_without_effect_change_nothing() -> None:
    for nothing in (None, {}, Augment()):
        assert scaled_data(augment=nothing).augment == Augment()
    batch = next(iter(scaled_data().train_dataloader()))
    off = at(scaled_data(augment={"policy": "none"}), 0).on_after_batch_transfer(batch, 0)
    expected = at(scaled_data(), 0).on_after_batch_transfer(batch, 0).images
    torch.testing.assert_close(off.images, expected, rtol=0, atol=1e-6)


def test_samples_and_example_batches_equal_training_batches() -> None:
    data = at(scaled_data(augment={"crop": 2, "hue": 0.3, "mixup": 1.0}), 2)
    loader = data.train_dataloader()
    loader.set_epoch(2)
    first = data.on_after_batch_transfer(next(iter(loader)), 0)
    shown = (augmented_sample(data, 16, epoch=2).float() / 255 - 0.5) / 0.25
    torch.testing.assert_close(first.images, shown, rtol=0, atol=0.51 / 255 / 0.25)
    assert first.targets is not None and first.targets.shape == (16, 10)
    examples = list(batches_of_side(data, 6, None))
    sizes = [(len(batch.labels), batch.images.shape[2], batch.targets is None) for batch in examples]
    assert sizes == [(16, 6, False), (2, 6, False)]
    assert isinstance(examples[0], Batch)
