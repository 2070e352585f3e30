import json
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from real_runs import SETTINGS, here, only_run
from small_runs import Rows, classifier, fitted, same, shapes_data, trainer, weights
from torch.nn import functional as F
from torch.utils.data import DataLoader

from cifar_lit.data.loaders import Batch
from cifar_lit.errors import UsageError
from cifar_lit.training.callbacks import NotFiniteLoss
from cifar_lit.training.checkpoint import best_checkpoint, read_checkpoint
from cifar_lit.training.classifier import ImageClassifier


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"net": "resnet19"}, "Did you mean resnet18"),
        ({"optimizer": "sdg"}, "Did you mean sgd"),
        ({"lr": 0.0}, "set --lr"),
        ({"nesterov": True}, "nesterov needs model.momentum"),
        ({"schedule": "linear"}, "schedule must be one of"),
        ({"final_lr": -0.1}, "final_lr is a fraction"),
        ({"schedule_every": "batch"}, "schedule_every must be step or epoch"),
        ({"label_smoothing": 1.0}, "label_smoothing must be in"),
        ({"label_smoothing": -0.1}, "label_smoothing must be in"),
        ({"ema_decay": 1.0}, "ema_decay must be 0 for none or below 1"),
        ({"ema_decay": -0.5}, "ema_decay must be"),
        ({"width": 0.0}, "width"),
        ({"num_classes": 0}, "class"),
        ({"input_shape": [3, 4, 4]}, "cannot take 4×4"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_in_one_line(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line) as refused:
        classifier(**settings)
    assert "\n" not in str(refused.value)


class Steps(Callback):
    """Notes the loss and the number of images of every training step, by global step; and each epoch's means."""

    def __init__(self) -> None:
        self.losses: dict[int, tuple[float, int]] = {}
        self.epochs: list[tuple[float, float]] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses[trainer.global_step] = (float(outputs["loss"]), len(batch.labels))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.epochs.append(pl_module.running.epoch_means())  # type: ignore[operator]

    def mean(self, first: int, last: int) -> float:
        """Over the images of some steps, both included."""
        chosen = [self.losses[step] for step in range(first, last + 1)]
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
    expected = {last: steps.mean(first, last) for first, last in windows}
    assert rows.of("train/loss") == pytest.approx(expected, rel=1e-6)
    assert all(0 <= accuracy <= 1 for accuracy in rows.of("train/accuracy").values())


@pytest.mark.parametrize("settings", [{"log_every_n_steps": 3}, {"max_steps": 11, "max_epochs": -1}])
def test_an_epochs_mean_is_that_over_all_of_its_images(settings: dict[str, Any]) -> None:
    steps = Steps()
    done = fitted(classifier(), shapes_data(), steps, **settings)
    assert [loss for loss, _ in steps.epochs] == pytest.approx([steps.mean(1, 7), steps.mean(8, done.global_step)], rel=1e-6)


def test_training_accuracy_is_the_share_of_hits() -> None:
    rows, hits = Rows(), []
    model, data = classifier(), shapes_data()
    step = model.training_step

    def counted(batch: Batch, batch_idx: int) -> torch.Tensor:
        hits.append((model.net(batch.images).argmax(1) == batch.labels).float())
        return step(batch, batch_idx)

    model.training_step = counted  # type: ignore[method-assign]
    fitted(model, data, logger=rows, max_epochs=1)
    assert rows.of("train/accuracy")[7] == pytest.approx(float(torch.cat(hits).mean()))


def test_validation_is_logged_at_the_step_it_followed_and_equals_a_plain_evaluation() -> None:
    rows, model, data = Rows(), classifier(), shapes_data()
    fitted(model, data, logger=rows, max_epochs=1)
    images = data.train_images.images[data.split[1]].permute(0, 3, 1, 2)
    logits = model.eval()((images / 255 - 0.5) / 0.25)
    labels = data.train_images.labels[data.split[1]]
    assert rows.of("val/loss") == pytest.approx({7: float(F.cross_entropy(logits, labels))}, abs=1e-5)
    assert rows.of("val/accuracy") == pytest.approx({7: float((logits.argmax(1) == labels).float().mean())})


def test_a_batch_counts_with_its_share_in_the_gradient() -> None:
    images, labels = torch.randn(5, 3, 16, 16), torch.arange(5)
    moved = []
    for share in (1.0, 0.8):
        model = classifier(lr=0.1)
        before = weights(model)
        loader = DataLoader([Batch(images, labels, labels, loss_weight=share)], batch_size=None, collate_fn=lambda batch: batch)
        trainer(max_epochs=1).fit(model, loader)
        moved.append([weights(model)[name] - tensor for name, tensor in before.items() if name.startswith("net.")])
    for full, part in zip(*moved, strict=True):
        torch.testing.assert_close(part, 0.8 * full, rtol=1e-3, atol=1e-7)
    assert max(float(full.abs().max()) for full in moved[0]) > 0


def test_label_smoothing_is_torchs_in_training_and_absent_in_validation() -> None:
    rows, steps = Rows(), Steps()
    model, data = classifier(label_smoothing=0.3), shapes_data()
    first = model.on_after_batch_transfer(next(iter(data.train_dataloader())), 0)
    images = (first.images.permute(0, 3, 1, 2) / 255 - 0.5) / 0.25
    expected = F.cross_entropy(model(images), first.labels, label_smoothing=0.3)
    fitted(model, data, steps, logger=rows, max_epochs=1)
    assert steps.losses[1][0] == pytest.approx(float(expected), rel=1e-5)
    val = data.train_images.images[data.split[1]].permute(0, 3, 1, 2)
    plain = F.cross_entropy(model.eval()((val / 255 - 0.5) / 0.25), data.train_images.labels[data.split[1]])
    assert rows.of("val/loss")[7] == pytest.approx(float(plain), abs=1e-5)


class Blast(Callback):
    """From the second epoch on trains at a rate that no net survives, and keeps the weights after every step."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            for group in trainer.optimizers[0].param_groups:
                group["lr"] = 1e25

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.weights, self.step = weights(pl_module), trainer.global_step


def test_a_loss_that_is_not_finite_stops_before_it_reaches_weights_or_checkpoint(tmp_path: Path) -> None:
    blast, best, model = Blast(), best_checkpoint(), classifier()
    best.dirpath = str(tmp_path)
    with pytest.raises(NotFiniteLoss, match=r"the loss is (nan|inf) at step \d+ of epoch 1"):
        fitted(model, shapes_data(), blast, best, enable_checkpointing=True, max_epochs=5)
    assert blast.step >= 8
    assert same(weights(model), blast.weights)
    kept = read_checkpoint(tmp_path / "best.ckpt")
    assert kept["epoch"] == 0
    assert all(tensor.isfinite().all() for tensor in kept["state_dict"].values())
    assert math.isfinite(kept["cifar_lit"]["score"]["loss"])


def test_memory_format_and_compilation_do_not_change_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    compile = torch.compile  # traced for real, but run by torch itself: no C++ compiler is needed
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile(function, backend="eager"))
    images = torch.randn(4, 3, 16, 16)
    plain = classifier(channels_last=False).eval()
    expected = plain(images)
    for settings in ({"channels_last": True}, {"compile": True}, {"channels_last": True, "compile": True}):
        model = classifier(**settings).eval()
        torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-5)
        assert model.state_dict().keys() == plain.state_dict().keys()


def test_accumulated_batches_train_as_one_of_their_size() -> None:
    small, large = classifier(), classifier()
    done = fitted(small, shapes_data(val_size=24, batch_size=8), accumulate_grad_batches=2)
    fitted(large, shapes_data(val_size=24, batch_size=16))
    assert done.global_step == 12
    for name, parameter in small.state_dict().items():
        torch.testing.assert_close(parameter, large.state_dict()[name], rtol=1e-4, atol=1e-6, msg=name)


def test_accumulated_batches_are_logged_by_optimizer_steps_without_losing_images() -> None:
    rows, steps = Rows(), Steps()
    fitted(
        classifier(), shapes_data(val_size=24, batch_size=8), steps, logger=rows, accumulate_grad_batches=2, log_every_n_steps=2
    )
    assert sorted(rows.of("train/loss")) == [2, 4, 6, 8, 10, 12]
    assert len(steps.epochs) == 2


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_gradients_are_clipped_by_the_trainers_setting(precision: Any) -> None:
    model = classifier(lr=1.0)
    before = weights(model)
    fitted(model, shapes_data(), gradient_clip_val=1e-3, max_steps=1, max_epochs=-1, precision=precision)
    moved = sum(float((tensor - before[name]).square().sum()) for name, tensor in model.state_dict().items()) ** 0.5
    assert moved == pytest.approx(1e-3, rel=1e-2)


def test_a_checkpoint_is_loaded_as_lightning_users_do(tmp_path: Path) -> None:
    model = classifier(optimizer="adamw", lr=0.01)
    fitted(model, shapes_data(), max_epochs=1).save_checkpoint(tmp_path / "own.ckpt")
    loaded = ImageClassifier.load_from_checkpoint(tmp_path / "own.ckpt")
    assert same(weights(loaded), weights(model))
    assert loaded.hparams == model.hparams
    scored = trainer().test(classifier(), datamodule=shapes_data(), ckpt_path=tmp_path / "own.ckpt", verbose=False)
    assert scored == trainer().test(model, datamodule=shapes_data(), verbose=False)


def test_predictions_are_probabilities_of_every_test_image_once() -> None:
    data, model = shapes_data(eval_batch_size=7), classifier()
    batches = trainer().predict(model, datamodule=data)
    assert batches is not None
    joined = {name: torch.cat([batch[name] for batch in batches]) for name in ("indices", "labels", "probabilities")}  # type: ignore[call-overload]
    assert torch.equal(joined["indices"], torch.arange(24))
    assert torch.equal(joined["labels"], data.test_images.labels)
    images = (data.test_images.images.permute(0, 3, 1, 2) / 255 - 0.5) / 0.25
    torch.testing.assert_close(joined["probabilities"], model.eval()(images).softmax(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "bf16-mixed"])
def test_other_precisions_train_and_score_like_float32(precision: Any) -> None:
    rows, exact = Rows(), Rows()
    fitted(classifier(), shapes_data(), logger=rows, precision=precision)
    fitted(classifier(), shapes_data(), logger=exact)
    for name in ("train/loss", "val/loss"):
        assert rows.of(name) == pytest.approx(exact.of(name), rel=0.02)


def test_a_net_that_has_diverged_leaves_results_that_are_valid_json(tmp_path: Path) -> None:
    words = [
        "train",
        *SETTINGS,
        "--lr",
        "3e7",
        "--model.schedule",
        "constant",
        "--epochs",
        "1",
        "--trainer.limit_train_batches",
        "1",
    ]
    done = here(words, tmp_path)
    assert done.code == 0, done.err
    found = json.loads((only_run(tmp_path) / "metrics.json").read_text(), parse_constant=pytest.fail)
    assert found["test"]["loss"] is None
    assert found["test"]["images"] == 24
