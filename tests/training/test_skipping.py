"""skip_easy: the images of each round, also in a resumed run."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from cifar_lit.data.hard_rounds import HardRoundsLoader, LastLosses
from lightning.pytorch.callbacks import LambdaCallback
from small_runs import BATCHES, At, classifier, fitted, same, shapes_data, weights

from cifar_lit.data.augment import Augment
from cifar_lit.data.batch import Batch
from cifar_lit.data.image_set import ImageSet
from cifar_lit.errors import UsageError

SKIPS: dict[str, Any] = {"skip_easy": 0.5, "skip_from": 0.4, "augment": {"flip": "alternating", "crop": 1}}
SKIPS_AT = round(0.4 * 4 * BATCHES)  # steps, within an epoch


def loader_of(count: int, rows: torch.Tensor, skip_from: tuple[int, int] = (1, 0)) -> HardRoundsLoader:
    images = torch.randint(0, 256, (count, 8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    source = ImageSet(images, torch.zeros(count, dtype=torch.int64), ("a",))
    losses = LastLosses(count, torch.device("cpu"))
    skips: dict[str, Any] = {"losses": losses, "skip_easy": 0.6, "skip_from": skip_from}
    return HardRoundsLoader(source, rows, 10, Augment(flip="alternating"), **skips)


def test_late_epochs_repeat_the_images_that_are_hardest_at_each_round() -> None:
    rows = torch.arange(0, 200, 2)  # the training images have even numbers
    loader = loader_of(200, rows)
    shown: list[list[int]] = []
    looks: dict[int, list[torch.Tensor]] = {}
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        for number, batch in enumerate(loader):
            shown.append(batch.indices.tolist())
            # The loss of an image is its row number, and falls in the first round of the late epoch.
            loader.losses.latest[batch.indices] = batch.indices / (1000 if epoch and number < 4 else 1)
            for row, image in zip(shown[-1], batch.images, strict=True):
                looks.setdefault(row, []).append(image)
    assert len(loader) == 10 and len(shown) == 20
    parts = ((0, 10), (10, 14), (14, 18), (18, 20))
    first, hardest, second, third = (sorted(chain.from_iterable(shown[start:end])) for start, end in parts)
    assert first == rows.tolist()
    assert hardest == list(range(120, 200, 2))
    assert second == list(range(40, 120, 2))  # the hardest images are learnt
    assert {len(batch) for batch in shown} == {10} and set(third) <= set(second)
    for row in hardest:  # each round flips the images of the epoch before
        before, after = looks[row][:2]
        assert torch.equal(before, after.flip(1))


def test_a_round_within_an_epoch_flips_the_images_already_shown() -> None:
    loader = loader_of(100, torch.arange(100), skip_from=(0, 8))
    before: dict[int, torch.Tensor] = {}
    for number, batch in enumerate(loader):
        loader.losses.latest[batch.indices] = 1.0
        images = dict(zip(batch.indices.tolist(), batch.images, strict=True))
        if number < 8:
            before |= images
            continue
        shown_again = images.keys() & before.keys()
        assert shown_again
        assert all(torch.equal(images[row], before[row].flip(1)) for row in shown_again)


def test_losses_are_gathered_before_devices_get_other_images() -> None:
    """Otherwise a high loss of an earlier epoch would hide a lower and newer one of another device."""
    loader = loader_of(200, torch.arange(200), skip_from=(2, 0))
    loader.losses.latest.fill_(1.0)
    loader.set_epoch(1)
    next(iter(loader))
    assert loader.losses.latest.tolist() == [-1.0] * 200  # gathered


def test_images_without_a_loss_count_as_hardest_and_gathering_resets_in_place() -> None:
    losses = LastLosses(4, torch.device("cpu"))
    losses.latest[torch.tensor([0, 2])] = torch.tensor([3.0, 1.0])
    assert losses.gather().tolist() == [3.0, float("inf"), 1.0, float("inf")]
    address = losses.latest.data_ptr()
    losses.latest[2] = 0.0
    assert losses.gather().tolist() == [3.0, float("inf"), 0.0, float("inf")]
    assert losses.latest.data_ptr() == address and losses.latest.tolist() == [-1.0] * 4


@pytest.mark.parametrize("step", [9, SKIPS_AT, SKIPS_AT + 1, 2 * BATCHES, 2 * BATCHES + 3])
def test_a_resumed_run_shows_the_same_images(step: int, tmp_path: Path) -> None:
    shown: dict[int, list[int]] = {}
    shown_again: dict[int, list[int]] = {}

    def record(target: dict[int, list[int]]) -> Any:
        def note(trainer: Any, model: Any) -> None:
            target[trainer.global_step] = model.batch_indices

        return [At(number, note, after=True) for number in range(1, 4 * BATCHES + 1)]

    def recording() -> Any:
        model: Any = classifier()
        original = model.training_step

        def training_step(batch: Batch, batch_idx: int) -> Any:
            model.batch_indices = batch.indices.tolist()
            return original(batch, batch_idx)

        model.training_step = training_step
        return model

    save = At(step, lambda trainer, _: trainer.save_checkpoint(tmp_path / "a.ckpt"), after=True)
    whole, part = recording(), recording()
    fitted(whole, shapes_data(**SKIPS), *record(shown), save, max_epochs=4)
    fitted(part, shapes_data(**SKIPS), *record(shown_again), resume=tmp_path / "a.ckpt", max_epochs=4)
    assert len(shown) == 4 * BATCHES
    assert shown_again == {number: rows for number, rows in shown.items() if number > step}
    assert same(weights(whole), weights(part))
    round_of_three = chain.from_iterable(shown[number] for number in range(SKIPS_AT + 1, SKIPS_AT + 4))
    assert len(set(round_of_three)) == 48  # about half of 100, in whole batches


def test_invalid_settings_are_refused() -> None:
    for settings, line in (
        ({"skip_easy": 1.0}, r"data\.skip_easy is a share of the images, from 0 to below 1"),
        ({"skip_easy": 0.5, "skip_from": 1.5}, r"data\.skip_from is a share of the steps"),
        ({"skip_easy": 0.5, "shuffle": False}, r"leave data\.sampling none and data\.shuffle true"),
    ):
        with pytest.raises(UsageError, match=line):
            shapes_data(**settings)
    with pytest.raises(UsageError, match=r"needs the length of the training: set --epochs or --trainer\.max_steps"):
        fitted(classifier(), shapes_data(**SKIPS), max_epochs=-1)


def test_skip_from_counts_the_steps_of_a_limited_training() -> None:
    """Six of ten steps: the images of the first two epochs of three steps are those of a training without rounds."""
    shown: list[list[list[int]]] = []
    for settings in (SKIPS | {"skip_from": 0.6}, {"augment": SKIPS["augment"]}):
        steps: list[list[int]] = []
        note = LambdaCallback(
            on_train_batch_start=lambda _, __, batch, ___, to=steps: to.append(batch.indices.tolist())
        )
        fitted(classifier(), shapes_data(**settings), note, max_epochs=-1, max_steps=10, limit_train_batches=3)
        shown.append(steps)
    skipping, plain = shown
    assert skipping[:6] == plain[:6] and len(skipping) == 10
    assert all(ours != theirs for ours, theirs in zip(skipping[6:], plain[6:], strict=True))


def test_a_second_fit_with_the_same_data_starts_without_losses(tmp_path: Path) -> None:
    save = At(SKIPS_AT + 1, lambda trainer, _: trainer.save_checkpoint(tmp_path / "a.ckpt"), after=True)
    whole, again, data = classifier(), classifier(), shapes_data(**SKIPS)
    fitted(whole, shapes_data(**SKIPS), save, max_epochs=4)
    fitted(classifier(), data, resume=tmp_path / "a.ckpt", max_epochs=4)
    fitted(again, data, max_epochs=4)
    assert same(weights(whole), weights(again))
