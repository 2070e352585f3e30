"""What Lightning documents about metrics, precision and Trainer flags holds for this model as for any other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from small_runs import BATCHES, Rows, classifier, fitted, same, shapes_data, weights
from torchmetrics.classification import MulticlassAccuracy

from cifar_lit.training.checkpoint import AtomicCheckpointIO, read_checkpoint

# ---- metrics


def test_a_further_metric_reaches_score_loggers_and_callbacks_by_its_name(tmp_path: Path) -> None:
    metric = {"top5": MulticlassAccuracy(num_classes=10, top_k=5, average="micro")}
    rows, model, data = Rows(), classifier(metrics=metric), shapes_data(eval_batch_size=7)
    best = ModelCheckpoint(tmp_path / "best", filename="best", monitor="val/top5", mode="max")
    done = fitted(model, data, best, logger=rows)
    assert model.score is not None and set(model.score.further) == {"top5"}
    val = rows.of("val/top5")
    assert list(val) == [BATCHES, 2 * BATCHES]
    assert float(done.callback_metrics["val/top5"]) == val[2 * BATCHES] == model.score.further["top5"]
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
        ({"val_check_interval": 0.5, "max_steps": 10}, 10, 3),
        ({"limit_val_batches": 0}, 14, 0),
        ({"accumulate_grad_batches": 2}, 8, 2),
        ({"fast_dev_run": 3}, 3, 1),
        ({"overfit_batches": 2}, 4, 2),
        ({"num_sanity_val_steps": 1}, 14, 2),
    ],
)
def test_the_trainers_limits_mean_batches_and_optimizer_steps(
    settings: dict[str, Any], steps: int, validations: int
) -> None:
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


@pytest.mark.parametrize("precision", ["bf16-true", "16-mixed"])
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
