"""A fit against loops written by hand with torch's own calls: weights, losses, logged rows, order of images, predictions."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from small_runs import (
    BATCHES,
    Rows,
    assert_close,
    best_and_last,
    classifier,
    distance,
    fitted,
    same,
    shapes_data,
    trainer,
    weights,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from cifar_lit.data.augment import epoch_order
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.loaders import Batch
from cifar_lit.errors import UsageError
from cifar_lit.models.registry import build_net
from cifar_lit.training.classifier import ImageClassifier


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"net": "resnet19"}, "Did you mean resnet18"),
        ({"optimizer": "sdg"}, "Did you mean sgd"),
        ({"schedule": "linear"}, "schedule must be one of"),
        ({"final_lr": -0.1}, "final_lr is a fraction"),
        ({"schedule_every": "batch"}, "schedule_every must be step or epoch"),
        ({"schedule_every": "epoch", "schedule": "one_cycle"}, "schedule_every step"),
        ({"schedule_every": "epoch", "schedule": "cosine", "warmup_epochs": 1.0}, "schedule_every step"),
        *(({"label_smoothing": value}, "label_smoothing must be in") for value in (-0.1, 1.0)),
        *(({"ema_decay": value}, "ema_decay must be 0 for none or below 1") for value in (-0.5, 1.0)),
        ({"width": 0.0}, "width"),
        ({"num_classes": 0}, "class"),
        ({"input_shape": [3, 4, 4]}, "cannot take 4×4"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_in_one_line(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line) as refused:
        classifier(**settings)
    assert "\n" not in str(refused.value)


# ---- steps


def by_hand(
    net: str, data: ImageData, precision: str, clip: Callable[[list[nn.Parameter]], Any], accumulate: Sequence[int]
) -> tuple[dict[str, Tensor], int]:
    """State and steps of a tutorial's loop over as many epochs as `accumulate` names; an epoch's last group may be smaller.

    torch's optimizer is not fused there, and memory not channels_last. Images are as the data normalised them: where a pooling
    window has two equal pixels, the last digit decides which of them learns, so that other digits would end in other weights.
    """
    dtype = torch.float64 if precision == "64-true" else torch.float32
    torch.manual_seed(0)
    model = build_net(net, channels=3, image_size=16, num_classes=10).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = data.train_dataloader()
    steps = 0
    for epoch, group in enumerate(accumulate):
        loader.set_epoch(epoch)
        for number, batch in enumerate(loader, 1):
            images = data.on_after_batch_transfer(batch, 0).images.to(dtype).contiguous()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
                loss = F.cross_entropy(model(images), batch.labels)
            (loss / group).backward()
            if number % group == 0 or number == len(loader):
                clip(list(model.parameters()))
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
    return {f"net.{name}": tensor for name, tensor in model.state_dict().items()}, steps


CLIPS: dict[str, tuple[dict[str, Any], Callable[[list[nn.Parameter]], Any]]] = {
    "not at all": ({}, lambda parameters: None),
    "by norm": ({"gradient_clip_val": 0.05}, lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.05)),
    "by value": (
        {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"},
        lambda parameters: nn.utils.clip_grad_value_(parameters, 0.002),
    ),
}
# In float64 no rounding decides on which side of a limit a gradient lies. Mixed precision is shown by a perceptron: in
# bfloat16 many pixels of a pooling window are equal, and which one learns is up to the kernel.
TOLERANCE = {"32-true": 1e-6, "64-true": 1e-12, "bf16-mixed": 2e-6}


@pytest.mark.parametrize(
    ("net", "precision", "clip", "accumulate"),
    [
        ("tudui", "32-true", "not at all", (1, 1, 1)),
        ("lenet", "64-true", "not at all", (3, 3)),
        ("lenet", "64-true", "by norm", (1, 1)),
        ("lenet", "64-true", "by norm", (10, 10)),
        ("lenet", "64-true", "by value", (1, 2)),
        ("lenet", "64-true", "by value", (3, 3)),
        ("signs_mlp", "bf16-mixed", "not at all", (1, 1)),
        ("signs_mlp", "bf16-mixed", "by norm", (3, 3)),
        ("signs_mlp", "bf16-mixed", "by value", (2, 2)),
    ],
)
def test_a_fit_ends_with_the_weights_of_a_loop_written_by_hand(
    net: str, precision: Any, clip: str, accumulate: tuple[int, ...]
) -> None:
    settings, clipping = CLIPS[clip]
    expected, steps = by_hand(net, shapes_data(), precision, clipping, accumulate)
    if len(set(accumulate)) > 1:
        callbacks, settings = [GradientAccumulationScheduler(dict(enumerate(accumulate)))], settings
    else:
        callbacks, settings = [], {**settings, "accumulate_grad_batches": accumulate[0]}
    model = classifier(net=net, momentum=0.9)
    done = fitted(model, shapes_data(), *callbacks, precision=precision, max_epochs=len(accumulate), **settings)
    assert done.global_step == steps == sum(-(-BATCHES // group) for group in accumulate)
    assert_close(weights(model), expected, atol=TOLERANCE[precision])
    other = "32-true" if precision == "bf16-mixed" else precision  # what is to be seen makes a difference
    if clip != "not at all" or other != precision:
        plain, _ = by_hand(net, shapes_data(), other, CLIPS["not at all"][1], accumulate)
        assert distance(plain, expected) > 1e-5


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_other_precisions_train_and_score_like_float32(precision: Any) -> None:
    rows, exact = Rows(), Rows()
    fitted(classifier(), shapes_data(), logger=rows, precision=precision)
    fitted(classifier(), shapes_data(), logger=exact)
    for name in ("train/loss", "val/loss"):
        assert rows.of(name) == pytest.approx(exact.of(name), rel=0.02)


def one_batch(*batches: Batch) -> DataLoader[Any]:
    return DataLoader(list(batches), batch_size=None, collate_fn=lambda batch: batch)  # type: ignore[arg-type]


def test_a_batch_counts_with_its_loss_weight_in_the_gradient() -> None:
    images, labels = torch.randn(5, 3, 16, 16), torch.arange(5)
    moved = []
    for loss_weight in (1.0, 0.8):
        model = classifier(lr=0.1)
        before = weights(model)
        trainer(max_epochs=1).fit(model, one_batch(Batch(images, labels, labels, loss_weight)))
        moved.append([weights(model)[name] - tensor for name, tensor in before.items() if name.startswith("net.")])
    for full, part in zip(*moved, strict=True):
        torch.testing.assert_close(part, 0.8 * full, rtol=1e-3, atol=1e-7)
    assert any(full.any() for full in moved[0])


def test_a_batch_without_a_loss_weight_changes_neither_weights_nor_running_metrics() -> None:
    images, labels = torch.randn(4, 3, 16, 16), torch.arange(4)
    counted, rows = Batch(images, labels, labels), []
    for batches in ([counted], [counted, Batch(images.flip(0), labels, labels, 0.0)]):
        model, logged = classifier(), Rows()
        fit = trainer(max_epochs=1, logger=logged, log_every_n_steps=100)
        fit.fit(model, one_batch(*batches))
        rows.append((weights(model), list(logged.of("train/loss").values()), list(logged.of("train/accuracy").values())))
    assert same(rows[0][0], rows[1][0])
    assert rows[0][1:] == rows[1][1:]


def test_memory_format_and_compilation_do_not_change_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    compile = torch.compile  # traced for real, but run by torch itself: no C++ compiler is needed
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile(function, backend="eager"))
    images = torch.randn(4, 3, 16, 16)
    plain = classifier(channels_last=False).eval()
    for compiled in (False, True):
        model = classifier(channels_last=True, compile=compiled).eval()
        torch.testing.assert_close(model(images), plain(images), rtol=1e-4, atol=1e-5)
        assert model.state_dict().keys() == plain.state_dict().keys()


# ---- what is logged


class Steps(Callback):
    """Notes the loss and the number of images of every batch, by optimizer step; and each epoch's means."""

    def __init__(self) -> None:
        self.losses: list[tuple[int, float, int]] = []
        self.epochs: list[tuple[float, float]] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        scale = trainer.accumulate_grad_batches  # by which Lightning divides the loss that it hands out
        self.losses.append((trainer.global_step, float(outputs["loss"]) * scale, len(batch.labels)))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.epochs.append(pl_module.running.epoch_means())  # type: ignore[union-attr, operator]

    def mean(self, first: int, last: int) -> float:
        """Over the images of some steps, both included."""
        chosen = [(loss, count) for step, loss, count in self.losses if first <= step <= last]
        return sum(loss * count for loss, count in chosen) / sum(count for _, count in chosen)


@pytest.mark.parametrize(
    ("settings", "windows"),
    [
        ({"log_every_n_steps": 3}, [(1, 3), (4, 6), (7, 7), (8, 10), (11, 13), (14, 14)]),
        ({"log_every_n_steps": 1, "max_epochs": 1}, [(step, step) for step in range(1, 8)]),
        ({"log_every_n_steps": 100}, [(1, 7), (8, 14)]),
        ({"log_every_n_steps": 2, "limit_train_batches": 3}, [(1, 2), (3, 3), (4, 5), (6, 6)]),
        ({"log_every_n_steps": 4, "max_steps": 10, "max_epochs": -1}, [(1, 4), (5, 7), (8, 10)]),
    ],
)
def test_each_logged_loss_is_the_mean_over_the_images_since_the_last_one(
    settings: dict[str, Any], windows: list[tuple[int, int]]
) -> None:
    rows, steps = Rows(), Steps()
    fitted(classifier(), shapes_data(), steps, logger=rows, **settings)
    assert rows.of("train/loss") == pytest.approx({last: steps.mean(first, last) for first, last in windows}, rel=1e-6)
    assert all(0 <= accuracy <= 1 for accuracy in rows.of("train/accuracy").values())
    epochs = {step: loss for step, (loss, _) in zip((BATCHES, 2 * BATCHES), steps.epochs, strict=False)}
    if "limit_train_batches" not in settings:
        last = windows[-1][1]
        expected = [steps.mean(first, min(first + BATCHES - 1, last)) for first in range(1, last + 1, BATCHES)]
        assert list(epochs.values()) == pytest.approx(expected, rel=1e-6)


def test_accumulated_batches_are_logged_by_optimizer_steps_without_losing_images() -> None:
    rows, steps, data = Rows(), Steps(), shapes_data(val_size=24, batch_size=8)
    fitted(classifier(), data, steps, logger=rows, accumulate_grad_batches=2, log_every_n_steps=2)
    assert sorted(rows.of("train/loss")) == [2, 4, 6, 8, 10, 12]
    means = [sum(loss for _, loss, _ in steps.losses[first : first + 12]) / 12 for first in (0, 12)]
    assert [loss for loss, _ in steps.epochs] == pytest.approx(means, rel=1e-6)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
def test_losses_and_accuracies_are_torchs_smoothed_in_training_and_plain_in_validation(label_smoothing: float) -> None:
    rows, steps, hits = Rows(), Steps(), []
    model, data = classifier(label_smoothing=label_smoothing), shapes_data()
    first = data.on_after_batch_transfer(next(iter(data.train_dataloader())), 0)
    expected = F.cross_entropy(model(first.images), first.labels, label_smoothing=label_smoothing)
    step = model.training_step

    def counted(batch: Batch, batch_idx: int) -> Tensor:
        hits.append((model.net(batch.images).argmax(1) == batch.labels).float())
        return step(batch, batch_idx)

    model.training_step = counted  # type: ignore[method-assign]
    fitted(model, data, steps, logger=rows, max_epochs=1)
    assert steps.losses[0][1] == pytest.approx(float(expected), rel=1e-5)
    assert rows.of("train/accuracy")[BATCHES] == pytest.approx(float(torch.cat(hits).mean()))
    images, labels = data.train_images.images[data.split[1]].permute(0, 3, 1, 2), data.train_images.labels[data.split[1]]
    logits = model.eval()((images / 255 - 0.5) / 0.25)
    assert rows.of("val/loss") == pytest.approx({BATCHES: float(F.cross_entropy(logits, labels))}, abs=1e-5)
    assert rows.of("val/accuracy") == pytest.approx({BATCHES: float((logits.argmax(1) == labels).float().mean())})


# ---- which images are shown


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


def order(epoch: int) -> list[list[int]]:
    data = shapes_data()
    rows = data.split[0][epoch_order(100, seed=0, epoch=epoch)].tolist()
    return [rows[start : start + 16] for start in range(0, 100, 16)]


def test_each_epoch_has_an_order_of_its_own_and_every_image_once() -> None:
    seen = Seen()
    done = fitted(classifier(), shapes_data(eval_batch_size=7), seen, max_epochs=3)
    assert seen.train == {epoch: order(epoch) for epoch in range(3)}
    assert seen.train[0] != seen.train[1]
    assert sorted(seen.evaluated) == sorted(shapes_data().split[1].tolist() * 3)
    seen.evaluated.clear()
    done.test(classifier(), datamodule=shapes_data(eval_batch_size=7), verbose=False)
    assert sorted(seen.evaluated) == list(range(24))


def test_batches_that_are_overfitted_are_the_same_in_every_epoch() -> None:
    seen = Seen()
    fitted(classifier(), shapes_data(), seen, max_epochs=3, overfit_batches=2)
    rows = shapes_data().split[0].tolist()
    assert seen.train == {epoch: [rows[:16], rows[16:32]] for epoch in range(3)}


def test_a_finished_epochs_checkpoint_starts_the_next_at_its_first_batch(tmp_path: Path) -> None:
    seen, model, last = Seen(), classifier(schedule="cosine"), best_and_last(tmp_path)[1]
    settings: dict[str, Any] = {"enable_checkpointing": True, "limit_train_batches": 3}
    assert fitted(model, shapes_data(), last, max_epochs=1, **settings).global_step == 3
    fitted(model, shapes_data(), seen, last, max_epochs=3, resume=tmp_path / "last.ckpt", **settings)
    assert seen.train == {epoch: order(epoch)[:3] for epoch in (1, 2)}


@pytest.mark.usefixtures("dropout_net")
def test_images_that_stay_on_the_host_train_the_same_net() -> None:
    ends = []
    for settings in ({"placement": "device"}, {"placement": "host", "workers": 2}):
        model = classifier(net="dropout", momentum=0.9)
        fitted(model, shapes_data(crop=2, flip="alternating", cutout=3, resolutions={8: 0.5}, **settings))
        ends.append(weights(model))
    assert same(*ends)


@pytest.mark.usefixtures("dropout_net")
def test_the_net_sees_the_sizes_in_their_order_and_is_evaluated_at_full_size() -> None:
    model, shapes = classifier(net="dropout"), []
    model.net.register_forward_pre_hook(lambda net, images: shapes.append((net.training, tuple(images[0].shape[2:]))))
    done = fitted(model, shapes_data(resolutions={8: 0.4, 12: 0.2}), max_epochs=5)
    evaluated = (False, (16, 16))
    assert shapes == [shape for side in (8, 8, 12, 16, 16) for shape in [*([(True, (side, side))] * BATCHES), evaluated]]
    shapes.clear()
    done.test(model, datamodule=shapes_data(resolutions={8: 0.4}), verbose=False)
    assert shapes == [evaluated]


# ---- the end of a training, and its use


def test_a_checkpoint_is_loaded_as_lightning_users_do(tmp_path: Path) -> None:
    model = classifier(optimizer="adamw", lr=0.01)
    fitted(model, shapes_data(), max_epochs=1).save_checkpoint(tmp_path / "own.ckpt")
    loaded = ImageClassifier.load_from_checkpoint(tmp_path / "own.ckpt")
    assert same(weights(loaded), weights(model))
    assert loaded.hparams == model.hparams
    scored = trainer().test(classifier(), datamodule=shapes_data(), ckpt_path=tmp_path / "own.ckpt", verbose=False)
    assert scored == trainer().test(model, datamodule=shapes_data(), verbose=False)
