"""What Lightning documents about callbacks, loggers, precision and Trainer flags holds for this model as for any other."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from small_runs import BATCHES, Rows, classifier, fitted, same, shapes_data, weights
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from cifar_lit.training.checkpoint import AtomicCheckpointIO, read_checkpoint
from cifar_lit.training.schedules import schedule_factor

# ---- callbacks


@pytest.mark.parametrize(("monitor", "mode"), [("val/accuracy", "max"), ("train/loss", "min")])
def test_early_stopping_ends_the_training_when_what_it_monitors_gets_no_better(monitor: str, mode: str) -> None:
    """By 10 at least, which nothing does: so the first epoch is the best one, and after two more it is enough."""
    rows, stopping = Rows(), EarlyStopping(monitor, mode=mode, min_delta=10.0, patience=2)
    done = fitted(classifier(), shapes_data(), stopping, max_epochs=9, logger=rows, log_every_n_steps=100)
    assert (done.current_epoch, done.global_step) == (3, 3 * BATCHES)
    assert float(stopping.best_score) == pytest.approx(rows.of(monitor)[BATCHES])
    assert float(done.callback_metrics[monitor]) == pytest.approx(rows.of(monitor)[3 * BATCHES])


def test_the_learning_rate_monitor_logs_the_rate_of_each_step() -> None:
    rows, model = Rows(), classifier(schedule="triangular", lr=0.1)
    fitted(model, shapes_data(), LearningRateMonitor("step"), logger=rows, log_every_n_steps=1)
    expected = {step: 0.1 * schedule_factor("triangular", step, 2 * BATCHES, 0, 0) for step in range(2 * BATCHES)}
    names = {name for _, values in rows.rows for name in values if name.startswith("lr-")}
    assert len(names) == 2  # weights, which decay, and biases
    assert all(rows.of(name) == pytest.approx(expected) for name in names)


@pytest.mark.usefixtures("dropout_net")
def test_stochastic_weight_averaging_averages_epochs_and_updates_the_norms() -> None:
    """The callback averages the starts of its epochs, here the second to fourth, then shows the norms the images once more."""
    model, data, starts = classifier(net="dropout"), shapes_data(), list[dict[str, Tensor]]()
    keep = LambdaCallback(on_train_epoch_start=lambda trainer, module: starts.append(weights(module)))
    averaging = StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=2, annealing_epochs=1)
    fitted(model, data, keep, averaging, max_epochs=4)
    parameters = [name for name, _ in model.named_parameters() if name.startswith("net.")]
    for name in parameters:
        average = torch.stack([start[name] for start in starts[1:4]]).mean(0)
        torch.testing.assert_close(model.state_dict()[name], average, rtol=1e-5, atol=1e-6, msg=name)
    convolution, norm = model.net[0][0], model.net[0][1]
    loader = data.train_dataloader()
    loader.set_epoch(4)
    with torch.no_grad():
        means = [convolution(data.on_after_batch_transfer(batch, 0).images).mean((0, 2, 3)) for batch in loader]
    torch.testing.assert_close(norm.running_mean, torch.stack(means).mean(0), rtol=1e-4, atol=1e-5)
    assert int(norm.num_batches_tracked) == BATCHES


def test_a_checkpoint_callback_of_ones_own_saves_every_so_many_steps(tmp_path: Path) -> None:
    own, whole, resumed = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1), classifier(), classifier()
    fitted(whole, shapes_data(), own)
    assert {path.name for path in tmp_path.iterdir()} == {f"step={step}.ckpt" for step in (3, 6, 9, 12)}
    done = fitted(resumed, shapes_data(), resume=tmp_path / "step=9.ckpt")
    assert done.global_step == 2 * BATCHES and same(weights(resumed), weights(whole))


def test_hooks_are_called_and_what_they_do_to_gradients_takes_effect() -> None:
    model, norms = classifier(), list[float]()

    def zero(trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        norms.append(sum(float(weight.grad.square().sum()) for weight in module.parameters() if weight.grad is not None))
        optimizer.zero_grad()

    fitted(model, shapes_data(), LambdaCallback(on_before_optimizer_step=zero), max_epochs=1)
    assert len(norms) == BATCHES and min(norms) > 0
    assert same(weights(model), weights(classifier()))


# ---- loggers and metrics


def test_a_further_metric_reaches_score_loggers_and_callbacks_by_its_name(tmp_path: Path) -> None:
    metric = {"top5": MulticlassAccuracy(num_classes=10, top_k=5, average="micro")}
    rows, model, data = Rows(), classifier(metrics=metric), shapes_data(eval_batch_size=7)
    best = ModelCheckpoint(tmp_path / "best", filename="best", monitor="val/top5", mode="max")
    csv = CSVLogger(tmp_path / "logs")
    done = fitted(model, data, best, logger=[rows, csv])
    assert model.score is not None and set(model.score.further) == {"top5"}
    val = rows.of("val/top5")
    assert list(val) == [BATCHES, 2 * BATCHES]
    assert float(done.callback_metrics["val/top5"]) == val[2 * BATCHES] == model.score.further["top5"]
    assert "val/top5" in (Path(csv.log_dir) / "metrics.csv").read_text().splitlines()[0]
    assert float(best.best_model_score) == pytest.approx(max(val.values()))
    checkpoint = read_checkpoint(tmp_path / "best" / "best.ckpt")
    assert checkpoint["cifar_lit"]["score"]["further"] == {"top5": float(best.best_model_score)}
    assert not any("top5" in name for name in checkpoint["state_dict"])  # so that weights fit a model without it

    done.test(model, datamodule=data, verbose=False)
    assert model.score is not None and model.predictions is not None
    likeliest, labels = model.predictions["probabilities"].topk(5).indices, model.predictions["labels"]
    share = float((likeliest == labels[:, None]).any(1).float().mean())
    assert rows.of("test/top5") == pytest.approx({2 * BATCHES: share})
    resumed = classifier(metrics=metric)
    fitted(resumed, data, resume=tmp_path / "best" / "best.ckpt", max_epochs=3)
    assert resumed.score is not None and set(resumed.score.further) == {"top5"}


# ---- the Trainer's flags


@pytest.mark.parametrize(
    ("settings", "steps", "validations"),
    [
        ({"limit_train_batches": 3}, 6, 2),
        ({"max_steps": 10, "max_epochs": -1}, 10, 1),
        ({"val_check_interval": 3}, 14, 4),
        ({"val_check_interval": 0.5, "max_steps": 10}, 10, 3),
        ({"limit_val_batches": 0}, 14, 0),
        ({"accumulate_grad_batches": 2}, 8, 2),
        ({"fast_dev_run": 3}, 3, 1),
        ({"overfit_batches": 2}, 4, 2),
        ({"num_sanity_val_steps": 1}, 14, 2),
    ],
)
def test_the_trainers_limits_mean_batches_and_optimizer_steps(settings: dict[str, Any], steps: int, validations: int) -> None:
    rows, count = Rows(), list[bool]()
    counted = LambdaCallback(on_validation_end=lambda trainer, _: count.append(not trainer.sanity_checking))
    done = fitted(classifier(), shapes_data(), counted, logger=rows, **settings)
    assert (done.global_step, sum(count)) == (steps, validations)
    assert all(loss == loss for loss in rows.of("train/loss").values())
    assert len(rows.of("val/loss")) == (0 if "fast_dev_run" in settings else validations)


def test_what_only_looks_leaves_training_and_rows_as_they_were() -> None:
    ends = []
    for settings in ({}, {"val_check_interval": 3, "detect_anomaly": True}):
        rows, model = Rows(), classifier(momentum=0.9, ema_decay=0.9)
        fitted(model, shapes_data(), logger=rows, log_every_n_steps=2, **settings)
        ends.append((weights(model), rows.of("train/loss")))
    assert same(ends[0][0], ends[1][0]) and ends[0][1] == ends[1][1]


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "16-mixed"])
def test_other_precisions_train_and_score_like_float32(precision: Any) -> None:
    """Among them losses that are scaled for float16, and unscaled before they are clipped and logged."""
    exact, model, usual, rows = classifier(net="signs_mlp"), classifier(net="signs_mlp"), Rows(), Rows()
    before = weights(model)
    settings: dict[str, Any] = {"gradient_clip_val": 1e-2, "log_every_n_steps": 1, "max_epochs": 1}
    fitted(exact, shapes_data(), logger=usual, **settings)
    if precision == "16-mixed":
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        settings["plugins"] = [AtomicCheckpointIO(), MixedPrecision("16-mixed", "cpu", scaler)]
    else:
        settings["precision"] = precision
    fitted(model, shapes_data(), logger=rows, **settings)
    for name in ("train/loss", "val/loss"):
        assert rows.of(name) == pytest.approx(usual.of(name), rel=0.02)
    if precision != "bf16-true":  # which rounds weights
        for name, tensor in weights(exact).items():
            assert (weights(model)[name] - tensor).norm() <= 0.05 * (tensor - before[name]).norm(), name
