"""The feature margins: the mean logit margin of each training image, also in a resumed run and on two devices."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback
from small_runs import BATCHES, MOMENTUM, At, best_and_last, classifier, fitted, shapes_data
from test_ranks import TWO, two_ranks
from torch import Tensor

from cifar_lit.base.errors import UsageError
from cifar_lit.data.image_set import Batch
from cifar_lit.features.margins import Margins


def margins_after(folder: Path, *more: Callback, resume: Path | None = None, **settings: Any) -> np.ndarray:
    """Train two epochs, and return the contents of margins.npy."""
    last = best_and_last(folder / "checkpoints")[1]
    fitted(classifier(**MOMENTUM), shapes_data(), Margins(), *more, last, resume=resume, **settings)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # the first rank writes the file
    return np.load(folder / "margins.npy")


def test_the_margin_is_the_logit_of_the_label_minus_the_largest_other_averaged_over_steps(tmp_path: Path) -> None:
    steps: list[tuple[Tensor, Tensor, Tensor]] = []

    def see(losses: Tensor, logits: Tensor, batch: Batch) -> Tensor:
        steps.append((logits.detach(), batch.labels, batch.indices))
        return losses

    watch = LambdaCallback(setup=lambda trainer, model, stage: model.loss.changes.append(see))
    margins = margins_after(tmp_path, watch)
    logits, labels, indices = (torch.cat(values) for values in zip(*steps, strict=True))
    expected: dict[int, list[float]] = {}
    for values, label, row in zip(logits.tolist(), labels.tolist(), indices.tolist(), strict=True):
        margin = values[label] - max(value for place, value in enumerate(values) if place != label)
        expected.setdefault(row, []).append(margin)
    train, val = shapes_data().split
    assert margins.dtype == np.float32 and len(margins) == 120
    assert set(expected) == set(train.tolist()) and {len(values) for values in expected.values()} == {2}
    assert np.isnan(margins[val]).all()
    assert margins[train] == pytest.approx([sum(expected[row]) / 2 for row in train.tolist()], abs=2e-6)


@pytest.mark.parametrize("step", [3, BATCHES, BATCHES + 2])
def test_a_resumed_run_writes_the_same_margins(step: int, tmp_path: Path) -> None:
    save = At(step, lambda trainer, _: trainer.save_checkpoint(tmp_path / "a.ckpt"), after=True)
    whole = margins_after(tmp_path / "whole", save)
    assert np.array_equal(margins_after(tmp_path / "part", resume=tmp_path / "a.ckpt"), whole, equal_nan=True)


def test_a_run_that_was_killed_after_its_last_checkpoint_writes_its_margins_when_resumed(tmp_path: Path) -> None:
    whole = margins_after(tmp_path)
    (tmp_path / "margins.npy").unlink()
    again = margins_after(tmp_path, resume=tmp_path / "checkpoints" / "last.ckpt")
    assert np.array_equal(again, whole, equal_nan=True)


def margins_of_two_ranks(folder: str) -> list[int]:
    """Train on two ranks, whole and resumed within an epoch."""

    def command() -> int:
        place = Path(folder)
        save = At(BATCHES + 2, lambda trainer, _: trainer.save_checkpoint(place / "a.ckpt"), after=True)
        whole = margins_after(place / "whole", save, **TWO)
        part = margins_after(place / "part", resume=place / "a.ckpt", **TWO)
        (place / f"{os.environ['RANK']}.json").write_text(json.dumps(np.array_equal(whole, part, equal_nan=True)))
        return 0

    return two_ranks(command, folder)


@pytest.mark.slow
def test_two_devices_write_the_margins_of_one_and_the_same_after_a_resume(
    forking: Callable[..., Any], tmp_path: Path
) -> None:
    assert forking(margins_of_two_ranks, folder=str(tmp_path)) == [0, 0], (tmp_path / "rank-0.txt").read_text()
    assert json.loads((tmp_path / "0.json").read_text()) is True
    one = margins_after(tmp_path / "one")
    np.testing.assert_allclose(np.load(tmp_path / "whole" / "margins.npy"), one, rtol=1e-3, atol=1e-4)


def test_repeated_images_of_a_batch_count_each_time_and_a_surplus_batch_not_at_all() -> None:
    margins = Margins()
    margins.sums = torch.zeros(2, 3, dtype=torch.int64)
    logits = torch.tensor([[3.0, 1.0, 0.5], [0.0, 2.0, 4.0]])
    batch = Batch(torch.zeros(2), torch.tensor([0, 1]), torch.tensor([1, 1]))
    losses = torch.ones(2)
    assert margins.add(losses, logits, batch) is losses
    margins.add(losses, logits, Batch(batch.images, batch.labels, batch.indices, loss_weight=0.0))
    assert (margins.sums * torch.tensor([[2.0**-20], [1.0]])).tolist() == [[0.0, 0.0, 0.0], [0.0, 2.0, 0.0]]


def test_mixed_images_are_refused() -> None:
    with pytest.raises(UsageError, match="remove mixup and cutmix"):
        fitted(classifier(), shapes_data(augment={"mixup": 0.2}), Margins())
