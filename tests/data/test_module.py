from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.loaders import Batch, EvalLoader
from cifar_lit.data.sources import SOURCES, SourceSettings, load_images
from cifar_lit.errors import UsageError


def shapes_data(**settings: Any) -> ImageData:
    return ImageData("shapes", **{"count": 60, "image_size": 12, "val_size": 10, "batch_size": 16, **settings})


def test_shape_classes_and_parts_are_those_of_the_images() -> None:
    data = shapes_data(channels=1, num_classes=4)
    assert data.input_shape == [1, 12, 12]
    assert data.class_count == len(data.classes) == 4
    assert [len(part) for part in data.split] == [50, 10]
    assert len(data.test_images) == 12
    assert sum(len(batch.labels) for batch in data.train_dataloader()) == 50
    val = data.val_dataloader()
    assert isinstance(val, EvalLoader)
    assert sum(len(batch.labels) for batch in val) == 10
    for loader in (data.test_dataloader(), data.predict_dataloader()):
        assert sum(len(batch.labels) for batch in loader) == 12


def test_batches_come_out_normalised_as_float_images_and_keep_all_else() -> None:
    data = shapes_data(mean=[0.1, 0.2, 0.3], std=[0.5, 0.6, 0.7])
    batch = next(iter(data.train_dataloader()))
    result = data.on_after_batch_transfer(batch, 0)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in data.statistics)
    torch.testing.assert_close(result.images, (batch.images.permute(0, 3, 1, 2) / 255 - mean) / std, rtol=1e-5, atol=1e-5)
    assert result.images.dtype == torch.float32
    assert torch.equal(result.labels, batch.labels)
    assert torch.equal(result.indices, batch.indices)
    assert result.loss_weight == batch.loss_weight


def test_measured_statistics_make_the_training_images_standard() -> None:
    data = shapes_data(count=200)
    rows = data.split[0]
    batch = Batch(data.train_images.images[rows], data.train_images.labels[rows], rows)
    pixels = data.on_after_batch_transfer(batch, 0).images.transpose(0, 1).flatten(1)
    torch.testing.assert_close(pixels.mean(1), torch.zeros(3), atol=1e-3, rtol=0)
    torch.testing.assert_close(pixels.std(1), torch.ones(3), atol=1e-3, rtol=0)


def test_one_number_stands_for_every_channel_and_given_ones_are_not_measured() -> None:
    assert shapes_data(mean=0.5, std=0.25).statistics == ([0.5] * 3, [0.25] * 3)
    assert shapes_data(mean=[0.1, 0.2, 0.3], std=1).statistics == ([0.1, 0.2, 0.3], [1.0] * 3)
    measured = shapes_data().statistics
    assert shapes_data(mean=0.5).statistics == ([0.5] * 3, measured[1])
    assert shapes_data(std=0.5).statistics == (measured[0], [0.5] * 3)


@pytest.mark.parametrize("settings", [{"mean": [0.1, 0.2]}, {"std": [0.1]}, {"std": 0.0}, {"mean": 0.5, "std": [0.5, 0.5, -1.0]}])
def test_statistics_of_the_wrong_length_or_sign_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="need 3 numbers"):
        _ = shapes_data(**settings).statistics


def test_without_a_validation_part_everything_is_trained_on() -> None:
    data = shapes_data(val_size=0)
    assert data.val_dataloader() == []
    assert len(data.split[0]) == 60


def test_validation_images_do_not_change_with_the_seed_of_the_run() -> None:
    first, second = (shapes_data(seed=seed) for seed in (0, 1))
    assert torch.equal(first.split[1], second.split[1])
    assert torch.equal(first.train_images.images, second.train_images.images)
    assert not torch.equal(shapes_data(split_seed=1).train_images.images, first.train_images.images)
    orders = [torch.cat([batch.indices for batch in data.train_dataloader()]) for data in (first, second)]
    assert not torch.equal(*orders)


def test_a_sample_shows_the_images_as_the_first_epoch_augments_them() -> None:
    data = shapes_data(crop=2, flip="random", cutout=3)
    shown = torch.cat([batch.images for batch in data.train_dataloader()])
    sample = data.sample(8)
    assert sample.shape == (8, 3, 12, 12)
    assert torch.equal(sample, shown[:8].permute(0, 3, 1, 2))


def test_a_position_saved_by_the_data_is_taken_up_by_the_next_training_loader() -> None:
    data, resumed = shapes_data(), shapes_data()
    assert data.state_dict() == {}
    batches = iter(data.train_dataloader())
    next(batches)
    resumed.load_state_dict(data.state_dict())
    rest = [batch.indices.tolist() for batch in resumed.train_dataloader()]
    assert rest == [batch.indices.tolist() for batch in batches]
    assert len(rest) == 3


def test_a_position_in_mid_epoch_is_refused_for_other_batches_and_one_at_its_end_is_not() -> None:
    data = shapes_data()
    loader = data.train_dataloader()
    batches = iter(loader)
    next(batches)
    with pytest.raises(UsageError, match="batches of 16: leave --batch-size at that"):
        shapes_data(batch_size=8).load_state_dict(data.state_dict())
    list(batches)
    other = shapes_data(batch_size=8)
    other.load_state_dict(data.state_dict())
    following = other.train_dataloader()
    following.set_epoch(1)
    assert sum(len(batch.labels) for batch in following) == 50


def test_the_nearest_name_is_offered_for_an_unknown_data_set() -> None:
    with pytest.raises(UsageError, match=r"no data set is called 'cifar-10'\. Did you mean cifar10\?") as refused:
        _ = ImageData("cifar-10").train_images
    assert all(name in str(refused.value) for name in SOURCES)


def test_a_folder_needs_to_be_named_and_too_few_shapes_are_refused() -> None:
    with pytest.raises(UsageError, match="--data-dir PATH"):
        load_images("folder", SourceSettings(), train=True)
    with pytest.raises(UsageError, match="at least 10 images"):
        load_images("shapes", SourceSettings(count=9), train=True)


def test_shapes_have_a_fifth_of_their_training_images_for_the_test() -> None:
    settings = SourceSettings(count=55, image_size=10, channels=1, num_classes=3)
    train, test = (load_images("shapes", settings, train) for train in (True, False))
    assert (len(train), len(test)) == (55, 11)
    assert train.images.shape[1:] == (10, 10, 1)
    assert len(train.classes) == 3


def test_settings_that_an_archive_does_not_have_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from cifar_lit.data import archives

    small = load_images("shapes", SourceSettings(count=10), train=True)
    asked: list[tuple[Path, bool, tuple[str, ...]]] = []

    def cifar10(root: Path, train: bool, urls: tuple[str, ...]) -> Any:
        asked.append((root, train, urls))
        return small

    monkeypatch.setattr(archives, "cifar10", cifar10)
    assert load_images("cifar10", SourceSettings(root=str(tmp_path), url="file:x", image_size=32), train=False) is small
    assert asked == [(tmp_path, False, ("file:x",))]
    for settings in (SourceSettings(image_size=64), SourceSettings(channels=1), SourceSettings(num_classes=100)):
        with pytest.raises(UsageError, match=r"data\.\w+ of cifar10 is \d+, not \d+: leave it out"):
            load_images("cifar10", settings, train=True)


def test_a_class_count_that_a_folder_does_not_have_is_refused(tmp_path: Path) -> None:
    from PIL import Image

    for part in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / "own" / part / name).mkdir(parents=True)
            Image.new("RGB", (8, 8), "red").save(tmp_path / "own" / part / name / "1.png")
    right = SourceSettings(root=str(tmp_path / "own"), cache_dir=str(tmp_path / "cache"), num_classes=2)
    assert load_images("folder", right, train=True).classes == ("cat", "dog")
    with pytest.raises(UsageError, match="has 2 classes, not 3"):
        load_images("folder", replace(right, num_classes=3), train=True)
