"""skip_easy: the images of each round, also in a resumed run."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from small_runs import BATCHES, At, classifier, fitted, same, shapes_data, weights

from cifar_lit.base.errors import UsageError
from cifar_lit.data.augment import Augment
from cifar_lit.data.image_set import ImageSet
from cifar_lit.features.skip_easy import HardRoundsLoader, LastLosses, SkipEasy

MOVES: dict[str, Any] = {"augment": {"flip": "alternating", "crop": 1}}
SKIPS_AT = round(0.4 * 4 * BATCHES)  # steps, within an epoch


def loader_of(count: int, rows: torch.Tensor, skip_from: tuple[int, int] = (1, 0)) -> HardRoundsLoader:
    images = torch.randint(0, 256, (count, 8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    source = ImageSet(images, torch.zeros(count, dtype=torch.int64), ("a",))
    losses = LastLosses(count, torch.device("cpu"))
    skips: dict[str, Any] = {"losses": losses, "skip_easy": 0.6, "skip_from": skip_from}
    return HardRoundsLoader(source, rows, 10, Augment(flip="alternating"), torch.zeros(3).byte(), **skips)


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


@pytest.mark.parametrize("step", [9, SKIPS_AT + 1, 2 * BATCHES])
def test_a_resumed_run_ends_with_the_same_weights(step: int, tmp_path: Path) -> None:
    save = At(step, lambda trainer, _: trainer.save_checkpoint(tmp_path / "a.ckpt"), after=True)
    whole, part = classifier(), classifier()
    fitted(whole, shapes_data(**MOVES), SkipEasy(0.5, 0.4), save, max_epochs=4)
    fitted(part, shapes_data(**MOVES), SkipEasy(0.5, 0.4), resume=tmp_path / "a.ckpt", max_epochs=4)
    assert same(weights(whole), weights(part))


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(UsageError, match=r"skip_easy\.share is a share of the images, above 0 and below 1"):
        SkipEasy(1.0)
    with pytest.raises(UsageError, match=r"needs the length of the training: set --epochs or --trainer\.max_steps"):
        fitted(classifier(), shapes_data(), SkipEasy(), max_epochs=-1)


def test_start_counts_the_steps_of_a_limited_training() -> None:
    """Six of ten steps: the images of the first two epochs of three steps are those of a training without rounds."""
    shown: list[list[list[int]]] = []
    for skips in ([SkipEasy(0.5, 0.6)], []):
        steps: list[list[int]] = []
        note = LambdaCallback(
            on_train_batch_start=lambda _, __, batch, ___, to=steps: to.append(batch.indices.tolist())
        )
        fitted(classifier(), shapes_data(**MOVES), *skips, note, max_epochs=-1, max_steps=10, limit_train_batches=3)
        shown.append(steps)
    skipping, plain = shown
    assert skipping[:6] == plain[:6] and len(skipping) == 10
    assert all(ours != theirs for ours, theirs in zip(skipping[6:], plain[6:], strict=True))
