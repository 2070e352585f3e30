"""A fit equals a handwritten torch loop: weights, losses and logged rows."""

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from small_runs import (
    BATCHES,
    MOMENTUM,
    Rows,
    assert_close,
    classifier,
    fitted,
    same,
    shapes_data,
    trainer,
    weights,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from cifar_lit.base.errors import UsageError
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.image_set import Batch
from cifar_lit.models.registry import build_net


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"lr": 0.0}, "the learning rate must be above 0"),
        ({"label_smoothing": 1.0}, "below 1"),
        ({"temperature": -1.0}, "model.temperature must be above 0"),
        ({"schedule_options": {"every": "epoch", "warmup_epochs": 1.0}}, r"schedule_options\.every step"),
        ({"optimizer_options": {"momentum": "0.9"}}, "momentum must be a number, not '0.9'"),
        ({"optimizer_options": {"bias_lr": 1.0}}, r"no setting 'bias_lr'\. sgd has momentum, nesterov, weight_decay\."),
    ],
)
def test_invalid_settings_are_refused_in_one_line(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line) as refused:
        classifier(**settings)
    assert "\n" not in str(refused.value)


# ---- steps


def test_mixed_images_are_learned_by_their_shares_and_scored_by_their_own_labels() -> None:
    model = classifier(label_smoothing=0.1)
    images = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    labels, shares = torch.tensor([0, 1, 2, 3, 4, 5]), torch.tensor([[0.7], [0.5], [1.0], [0.2], [0.0], [0.9]])
    targets = shares * F.one_hot(labels, 10) + (1 - shares) * F.one_hot(labels.roll(1), 10)
    loss = model.training_step(Batch(images, labels, labels, targets=targets), 0)
    logits = model(images)
    losses = [F.cross_entropy(logits, each, label_smoothing=0.1, reduction="none") for each in (labels, labels.roll(1))]
    torch.testing.assert_close(loss, (shares[:, 0] * losses[0] + (1 - shares[:, 0]) * losses[1]).mean())


BY_NORM = {"gradient_clip_val": 0.05}


def by_hand(net: str, data: ImageData, precision: str, clip: Any, accumulate: int) -> tuple[dict[str, Tensor], int]:
    """Return the state and the number of steps of a tutorial's loop over two epochs.

    The optimizer is not fused and the memory format is not channels_last. The images are those of the data module:
    in a pooling window with two equal pixels, the last digit decides which pixel receives the gradient.
    """
    dtype = torch.float64 if precision == "64-true" else torch.float32
    torch.manual_seed(0)
    model = build_net(net, channels=3, image_size=16, num_classes=10).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader, steps = data.train_dataloader(), 0
    for epoch in range(2):
        loader.set_epoch(epoch)
        for number, batch in enumerate(loader, 1):
            images = data.on_after_batch_transfer(batch, 0).images.to(dtype).contiguous()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
                loss = F.cross_entropy(model(images), batch.labels)
            (loss / accumulate).backward()
            if number % accumulate == 0 or number == len(loader):
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip["gradient_clip_val"])
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
    return {f"net.{name}": tensor for name, tensor in model.state_dict().items()}, steps


@pytest.mark.parametrize(
    ("net", "precision", "clip", "accumulate"),
    [
        ("tudui", "32-true", {}, 1),
        ("lenet", "64-true", BY_NORM, 10),
        ("signs_mlp", "bf16-mixed", BY_NORM, 3),
    ],
)
def test_a_fit_equals_a_handwritten_loop(net: str, precision: Any, clip: dict[str, Any], accumulate: int) -> None:
    """Clipping is compared in float64, without rounding at the limits. Mixed precision uses an MLP: in bfloat16 many
    pixels of a pooling window are equal, and the kernel decides which of them receives the gradient.
    """
    expected, steps = by_hand(net, shapes_data(), precision, clip, accumulate)
    model = classifier(net=net, **MOMENTUM)
    done = fitted(model, shapes_data(), precision=precision, accumulate_grad_batches=accumulate, **clip)
    assert done.global_step == steps == 2 * -(-BATCHES // accumulate)
    assert_close(weights(model), expected, atol={"32-true": 1e-6, "64-true": 1e-12, "bf16-mixed": 2e-6}[precision])


def after_batches(*batches: Batch) -> tuple[dict[str, Tensor], list[float]]:
    """Return the weights after an epoch of these batches, and the logged loss and accuracy."""
    model, rows = classifier(), Rows()
    loader = DataLoader(list(batches), batch_size=None, collate_fn=lambda batch: batch)
    trainer(max_epochs=1, logger=rows, log_every_n_steps=100).fit(model, loader)
    return weights(model), [*rows.curve("train/loss").values(), *rows.curve("train/accuracy").values()]


def test_the_gradient_is_scaled_by_the_loss_weight_and_a_batch_of_weight_0_is_ignored() -> None:
    batch, start = Batch(torch.randn(5, 3, 16, 16), torch.arange(5), torch.arange(5)), weights(classifier())
    whole, rows = after_batches(batch)
    part, _ = after_batches(replace(batch, loss_weight=0.8))
    expected = {name: 0.8 * (whole[name] - start[name]) for name in start}
    assert_close({name: part[name] - start[name] for name in start}, expected)
    assert not same(whole, start)
    ignored = replace(batch, images=batch.images.flip(0), loss_weight=0.0)
    with_ignored, rows_with_ignored = after_batches(batch, ignored)
    assert same(with_ignored, whole) and rows_with_ignored == rows


# ---- logging


class Losses(Callback):
    """Record the step, loss and size of each batch, and each epoch's mean by the module and by the batches."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, float, int]] = []
        self.epochs: list[tuple[float, float]] = []
        self._epoch_start = 0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        accumulate = trainer.accumulate_grad_batches  # Lightning divides the loss by this number
        step = -(-(len(self.batches) + 1) // accumulate)
        self.batches.append((step, float(outputs["loss"]) * accumulate, len(batch.labels)))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.epochs.append((pl_module.rows.epoch_means()["train/loss"], mean_loss(self.batches[self._epoch_start :])))
        self._epoch_start = len(self.batches)


def mean_loss(batches: list[tuple[int, float, int]]) -> float:
    return sum(loss * count for _, loss, count in batches) / sum(count for *_, count in batches)


ACCUMULATED = {"log_every_n_steps": 2, "accumulate_grad_batches": 2, "limit_train_batches": 6}


@pytest.mark.parametrize(
    ("settings", "windows"),
    [
        ({"log_every_n_steps": 3}, [(1, 3), (4, 6), (7, 7), (8, 10), (11, 13), (14, 14)]),
        ({"log_every_n_steps": 0}, [(1, 7), (8, 14)]),
        ({"log_every_n_steps": 4, "max_steps": 10, "max_epochs": -1}, [(1, 4), (5, 7), (8, 10)]),
        (ACCUMULATED, [(1, 2), (3, 3), (4, 5), (6, 6)]),
    ],
)
def test_each_logged_loss_is_the_mean_since_the_last_row(settings: Any, windows: list[tuple[int, int]]) -> None:
    rows, losses = Rows(), Losses()
    fitted(classifier(), shapes_data(), losses, logger=rows, **settings)
    means = {last: mean_loss([each for each in losses.batches if first <= each[0] <= last]) for first, last in windows}
    assert rows.curve("train/loss") == pytest.approx(means, rel=1e-6)
    assert all(0 <= accuracy <= 1 for accuracy in rows.curve("train/accuracy").values())
    assert [logged for logged, _ in losses.epochs] == pytest.approx([mean for _, mean in losses.epochs], rel=1e-6)


def test_the_training_accuracy_is_that_of_the_steps_and_the_validation_loss_is_not_smoothed() -> None:
    rows, hits = Rows(), []
    model, data = classifier(label_smoothing=0.3), shapes_data()
    step = model.training_step

    def counted(batch: Batch, batch_idx: int) -> Tensor:
        hits.append((model.net(batch.images).argmax(1) == batch.labels).float())
        return step(batch, batch_idx)

    model.training_step = counted
    fitted(model, data, logger=rows, max_epochs=1)
    assert rows.curve("train/accuracy")[BATCHES] == pytest.approx(float(torch.cat(hits).mean()))
    images, labels = (values[data.split[1]] for values in (data.train_images.images, data.train_images.labels))
    logits = model.eval()((images.permute(0, 3, 1, 2) / 255 - 0.5) / 0.25)
    assert rows.curve("val/loss") == pytest.approx({BATCHES: F.cross_entropy(logits, labels).item()}, abs=1e-5)
    assert rows.curve("val/accuracy") == pytest.approx({BATCHES: float((logits.argmax(1) == labels).float().mean())})
