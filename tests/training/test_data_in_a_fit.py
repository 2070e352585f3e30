from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback
from small_runs import classifier, fitted, same, shapes_data, trainer, weights

from cifar_lit.data.augment import epoch_order
from cifar_lit.training.checkpoint import last_checkpoint


class Seen(Callback):
    """Notes which images each training step of an epoch, and each evaluation, was given."""

    def __init__(self) -> None:
        self.train: dict[int, list[list[int]]] = {}
        self.evaluated: list[int] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self.train.setdefault(trainer.current_epoch, []).append(batch.indices.tolist())

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.evaluated += batch.indices.tolist()

    on_test_batch_start = on_validation_batch_start


def expected(epoch: int) -> list[list[int]]:
    data = shapes_data()
    order = data.split[0][epoch_order(100, seed=0, epoch=epoch)].tolist()
    return [order[start : start + 16] for start in range(0, 100, 16)]


def test_the_trainer_shows_each_epoch_in_its_own_order_and_every_image_once() -> None:
    seen = Seen()
    fitted(classifier(), shapes_data(), seen, max_epochs=3)
    assert seen.train == {epoch: expected(epoch) for epoch in range(3)}
    assert seen.train[0] != seen.train[1]
    assert sorted(seen.evaluated) == sorted(shapes_data().split[1].tolist() * 3)


def test_a_test_shows_every_test_image_once() -> None:
    seen = Seen()
    trainer(seen).test(classifier(), datamodule=shapes_data(eval_batch_size=7), verbose=False)
    assert sorted(seen.evaluated) == list(range(24))


@pytest.mark.parametrize("limit", [3, 1.0])
def test_a_finished_epochs_checkpoint_starts_the_next_at_its_first_batch(tmp_path: Path, limit: float) -> None:
    seen, last = Seen(), last_checkpoint()
    last.dirpath = str(tmp_path)
    options: dict[str, Any] = {"limit_train_batches": limit, "enable_checkpointing": True}
    fitted(classifier(schedule="cosine"), shapes_data(), last, max_epochs=1, **options)
    again = last_checkpoint()
    again.dirpath = str(tmp_path)
    fitted(classifier(schedule="cosine"), shapes_data(), seen, again, max_epochs=3, resume=tmp_path / "last.ckpt", **options)
    steps = 3 if limit == 3 else 7
    assert seen.train == {epoch: expected(epoch)[:steps] for epoch in (1, 2)}


@pytest.mark.parametrize("schedule", ["constant", "one_cycle"])
def test_a_checkpoint_in_mid_epoch_goes_on_with_the_next_batch(tmp_path: Path, schedule: str) -> None:
    class Save(Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 10:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    fitted(classifier(schedule=schedule), shapes_data(), Save(), max_epochs=3)
    seen = Seen()
    fitted(classifier(schedule=schedule), shapes_data(), seen, max_epochs=3, resume=tmp_path / "middle.ckpt")
    assert seen.train == {1: expected(1)[3:], 2: expected(2)}


def test_nothing_to_validate_on_is_no_obstacle() -> None:
    seen = Seen()
    done = fitted(classifier(), shapes_data(val_size=0, count=96), seen, max_epochs=1)
    assert done.global_step == 6
    assert seen.evaluated == []


@pytest.mark.usefixtures("dropout_net")
@pytest.mark.parametrize("workers", [1, 3])
def test_images_that_stay_on_the_host_train_the_same_net(workers: int) -> None:
    ends = []
    for settings in ({"placement": "device"}, {"placement": "host", "workers": workers}):
        model = classifier(net="dropout", momentum=0.9)
        fitted(model, shapes_data(crop=2, flip="alternating", cutout=3, **settings))
        ends.append(weights(model))
    assert same(*ends)
