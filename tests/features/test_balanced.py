"""The feature balanced: each class equally often in every epoch."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from small_runs import classifier, fitted, shapes_data

from cifar_lit.features.balanced import Balanced, balanced_order


@pytest.mark.parametrize("counts", [[50, 7, 1], [3, 0, 4, 10], [9, 9], [4], [1, 40, 1, 1]])
def test_a_balanced_order_shows_classes_and_their_images_equally_often(counts: list[int]) -> None:
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]
    orders = [balanced_order(labels, seed=3, epoch=epoch) for epoch in range(7)]
    for shown in (*orders, torch.cat(orders)):
        shows = torch.bincount(shown, minlength=len(labels))
        by_class = [shows[labels == label] for label in labels.unique()]
        totals = [int(per_image.sum()) for per_image in by_class]
        assert max(totals) - min(totals) <= 1
        assert all(per_image.max() - per_image.min() <= 1 for per_image in by_class)
    assert {len(order) for order in orders} == {len(labels)}


def test_a_balanced_order_depends_on_seed_and_epoch_and_mixes_the_classes() -> None:
    labels = torch.arange(100) % 2
    orders = {(seed, epoch): balanced_order(labels, seed, epoch) for seed, epoch in product(range(3), range(3))}
    assert len({tuple(order.tolist()) for order in orders.values()}) == 9
    assert torch.equal(balanced_order(labels, 1, 2), orders[1, 2])
    assert all(15 < labels[order[:50]].sum() < 35 for order in orders.values())
    rare = torch.tensor([0] * 90 + [1] * 10)
    shown = torch.cat([balanced_order(rare, 0, epoch) for epoch in (0, 1)])
    assert set(shown.tolist()) == set(range(100))  # all images of the common class, over two epochs


def test_a_fit_shows_the_classes_of_its_training_images_equally_often_and_in_another_order_each_epoch() -> None:
    shown: dict[int, list[int]] = {}
    note = LambdaCallback(
        on_train_batch_start=lambda trainer, _, batch, __: shown.setdefault(trainer.current_epoch, []).extend(
            batch.indices.tolist()
        )
    )
    data = shapes_data(num_classes=3)
    fitted(classifier(num_classes=3), data, Balanced(), note)
    for rows in shown.values():
        assert torch.bincount(data.train_images.labels[rows]).tolist() in ([33, 33, 34], [33, 34, 33], [34, 33, 33])
        assert set(rows) <= set(data.split[0].tolist())
    assert shown[0] != shown[1]
