"""The feature balanced: each class equally often in every epoch."""

from collections import Counter
from dataclasses import replace

import torch
from lightning.pytorch.callbacks import LambdaCallback
from small_runs import classifier, fitted, shapes_data

from cifar_lit.features.balanced import Balanced


def test_a_fit_shows_each_class_equally_often() -> None:
    data, shown = shapes_data(), list[int]()
    labels = torch.where(torch.arange(120) % 4 > 0, 0, data.train_images.labels % 4)
    data.parts.train_images = replace(data.train_images, labels=labels)
    note = LambdaCallback(on_train_batch_start=lambda _, __, batch, ___: shown.extend(batch.labels.tolist()))
    fitted(classifier(), data, Balanced(), note, max_epochs=1)
    assert Counter(shown) == dict.fromkeys(range(4), 25)
