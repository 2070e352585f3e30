from collections.abc import Sequence
from itertools import chain, product
from typing import Any

import pytest
import torch
from torch import Tensor

from cifar_lit.data.augment import Augmentation, augment_batch, epoch_order
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.loaders import PADDING, Batch, EvalLoader, TrainLoader
from cifar_lit.errors import UsageError


def image_set(count: int, size: int = 3) -> ImageSet:
    generator = torch.Generator().manual_seed(count)
    images = torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8, generator=generator)
    return ImageSet(images, torch.arange(count) % 5, tuple("abcde"))


def train_loaders(source: ImageSet, batch_size: int, world: int, **settings: Any) -> list[TrainLoader]:
    augmentation = settings.pop("augmentation", Augmentation())
    indices = settings.pop("indices", torch.arange(len(source)))
    return [TrainLoader(source, indices, batch_size, augmentation, rank=rank, world=world, **settings) for rank in range(world)]


def indices_of(batches: Sequence[Batch]) -> list[list[int]]:
    return [batch.indices.tolist() for batch in batches]


SIZES = list(product([5, 16, 101, 103], [4, 7, 8], [1, 2, 3, 4]))


@pytest.mark.parametrize(("count", "batch_size", "world"), SIZES)
def test_every_device_gets_its_part_of_the_same_global_batch_at_every_step(count: int, batch_size: int, world: int) -> None:
    source = image_set(count)
    loaders = train_loaders(source, batch_size, world, seed=4)
    order = epoch_order(count, seed=4, epoch=0).tolist()
    batches = [list(loader) for loader in loaders]
    assert {len(part) for part in batches} == {len(loaders[0])}
    wanted = [order[start : start + batch_size] for start in range(0, count, batch_size)]
    if len(wanted) > 1 and len(wanted[-1]) == 1:
        wanted.pop()  # batch norm cannot take a single image
    counted = [[batch.indices.tolist() if batch.loss_weight else [] for batch in part] for part in batches]
    assert [list(chain(*step)) for step in zip(*counted, strict=True)] == wanted
    assert min(len(batch.indices) for part in batches for batch in part) >= 1


@pytest.mark.parametrize(("rest", "parts"), [(2, [2, 0, 0]), (3, [3, 0, 0]), (4, [2, 2, 0]), (5, [3, 2, 0]), (6, [2, 2, 2])])
def test_a_last_batch_too_small_for_all_devices_is_shared_by_fewer_and_the_others_count_nothing(
    rest: int, parts: list[int]
) -> None:
    last = [list(loader)[-1] for loader in train_loaders(image_set(24 + rest), 8, 3)]
    assert [len(batch.indices) if batch.loss_weight else 0 for batch in last] == parts
    assert sum(batch.loss_weight for batch in last) == pytest.approx(3)
    everything = set(chain(*(batch.indices.tolist() for batch in last)))
    assert len(everything) == rest
    assert all(len(batch.indices) >= 2 for batch in last)  # so that a net with batch norm can take it


@pytest.mark.parametrize(("count", "batch_size", "world"), SIZES)
def test_loss_weights_make_the_average_over_devices_the_mean_over_the_global_batch(
    count: int, batch_size: int, world: int
) -> None:
    losses = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for step in zip(*train_loaders(image_set(count), batch_size, world), strict=True):
        averaged = sum(batch.loss_weight * losses[batch.indices].mean() for batch in step) / world
        everything = torch.cat([batch.indices for batch in step if batch.loss_weight])
        assert float(averaged) == pytest.approx(float(losses[everything].mean()), rel=1e-12)
        if len(everything) == batch_size and batch_size % world == 0:
            assert {batch.loss_weight for batch in step} == {1.0}


@pytest.mark.parametrize("block", [1, 3, 100])
def test_batches_do_not_depend_on_how_many_are_augmented_at_once(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"augmentation": Augmentation(crop=1, flip="random", cutout=2), "fill": torch.zeros(3).byte(), "seed": 3}
    expected = [list(loader) for loader in train_loaders(image_set(50, size=6), 8, 2, **settings)]
    monkeypatch.setattr("cifar_lit.data.loaders.BLOCK_IMAGES", 8 * block)
    loaders = train_loaders(image_set(50, size=6), 8, 2, **settings)
    for loader, batches in zip(loaders, expected, strict=True):
        for batch, other in zip(loader, batches, strict=True):
            assert all(torch.equal(part, whole) for part, whole in zip(batch[:3], other[:3], strict=True))
            assert batch.loss_weight == other.loss_weight


def test_labels_and_images_are_those_of_the_indices() -> None:
    source = image_set(20)
    for batch in train_loaders(source, 6, 1, indices=torch.arange(3, 17))[0]:
        assert torch.equal(batch.labels, source.labels[batch.indices])
        assert torch.equal(batch.images, source.images[batch.indices])
        assert batch.indices.min() >= 3 and batch.indices.max() < 17


def seen(loaders: Sequence[TrainLoader], epoch: int) -> dict[int, Tensor]:
    """Each image as it was shown in an epoch, by its index."""
    shown: dict[int, Tensor] = {}
    for loader in loaders:
        loader.set_epoch(epoch)
        for batch in loader:
            shown |= dict(zip(batch.indices.tolist(), batch.images, strict=True))
    return shown


@pytest.mark.parametrize(("world", "batch_size"), [(2, 8), (3, 8), (4, 20), (1, 3)])
def test_what_an_image_looks_like_in_an_epoch_does_not_depend_on_devices_or_batches(world: int, batch_size: int) -> None:
    source = image_set(40, size=8)
    settings = {"augmentation": Augmentation(crop=2, flip="random", cutout=3), "seed": 5, "fill": torch.zeros(3).byte()}
    alone = seen(train_loaders(source, 8, 1, **settings), epoch=3)
    shared = seen(train_loaders(source, batch_size, world, **settings), epoch=3)
    assert len(alone) == 40
    assert shared.keys() <= alone.keys()
    assert all(torch.equal(image, alone[index]) for index, image in shared.items())


def test_without_shuffling_every_epoch_goes_through_the_indices_in_order() -> None:
    indices = torch.tensor([4, 2, 9, 7, 1, 5, 8])
    loader = train_loaders(image_set(10), 5, 1, indices=indices, shuffle=False)[0]
    for epoch in (0, 5):
        loader.set_epoch(epoch)
        assert indices_of(list(loader)) == [[4, 2, 9, 7, 1], [5, 8]]


@pytest.mark.parametrize("stopped_after", [1, 3, 7])
def test_a_state_taken_in_mid_epoch_goes_on_with_the_next_batch(stopped_after: int) -> None:
    source = image_set(50)
    loader, resumed = (train_loaders(source, 8, 1, seed=7, augmentation=Augmentation(flip="random"))[0] for _ in "ab")
    loader.set_epoch(2)
    batches = iter(loader)
    before = [next(batches) for _ in range(stopped_after)]
    assert loader.state_dict()["position"] == stopped_after  # whatever was augmented ahead
    resumed.load_state_dict(loader.state_dict())
    resumed.set_epoch(2)
    after = list(resumed)
    assert len(before) + len(after) == 7
    for batch, expected in zip(after, batches, strict=True):
        assert torch.equal(batch.indices, expected.indices)
        assert torch.equal(batch.images, expected.images)
    for each in (loader, resumed):
        each.set_epoch(3)
    following = indices_of(list(resumed))
    assert following == indices_of(list(loader)) and len(following) == 7


def test_a_state_fits_another_number_of_devices() -> None:
    source = image_set(48)
    alone = train_loaders(source, 8, 1)[0]
    batches = iter(alone)
    for _ in range(2):
        next(batches)
    pair = train_loaders(source, 8, 2)
    for loader in pair:
        loader.load_state_dict(alone.state_dict())
    parts = [indices_of(list(loader)) for loader in pair]
    assert [left + right for left, right in zip(*parts, strict=True)] == indices_of(list(batches))


def test_batches_that_cannot_be_shared_out_are_refused() -> None:
    source = image_set(20)
    with pytest.raises(UsageError, match="raise --batch-size"):
        train_loaders(source, 3, 4)
    with pytest.raises(UsageError, match="2 training images are too few for 3 devices"):
        train_loaders(source, 8, 3, indices=torch.tensor([1, 2]))
    with pytest.raises(UsageError, match=r"data\.crop"):
        train_loaders(source, 8, 1, augmentation=Augmentation(crop=3))
    with pytest.raises(UsageError, match="eval_batch_size"):
        EvalLoader(source, torch.arange(20), 0)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_evaluation_covers_each_image_exactly_once_in_equal_numbers_of_steps(world: int, batch_size: int) -> None:
    for count in (*range(1, 41), 1003):
        source = image_set(count, size=1)
        parts = [list(EvalLoader(source, torch.arange(count), batch_size, rank=rank, world=world)) for rank in range(world)]
        assert len({len(part) for part in parts}) == 1
        counted = [batch.indices[batch.labels != PADDING] for part in parts for batch in part]
        assert torch.equal(torch.cat(counted).sort().values, torch.arange(count))


@pytest.mark.parametrize("world", [2, 3])
def test_evaluation_computes_every_image_in_the_same_company_on_any_number_of_devices(world: int) -> None:
    source = image_set(103)
    alone = [batch.indices.tolist() for batch in EvalLoader(source, torch.arange(103), 10)]
    shared = [EvalLoader(source, torch.arange(103), 10, rank=rank, world=world) for rank in range(world)]
    together = sorted(batch.indices.tolist() for part in shared for batch in part if batch.labels[0] != PADDING)
    assert together == sorted(alone)


def test_evaluation_shows_images_and_labels_of_the_chosen_part_unchanged() -> None:
    source = image_set(30)
    chosen = torch.tensor([3, 8, 21, 29, 0])
    batches = list(EvalLoader(source, chosen, 2))
    assert torch.equal(torch.cat([batch.images for batch in batches]), augment_batch(source.images, chosen, None))
    assert torch.equal(torch.cat([batch.labels for batch in batches]), source.labels[chosen])
    assert {batch.loss_weight for batch in batches} == {1.0}


def test_an_empty_part_has_no_batches() -> None:
    loader = EvalLoader(image_set(5), torch.arange(0), 4, world=2)
    assert len(loader) == 0
    assert list(loader) == []
