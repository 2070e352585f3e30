"""Lightning's documented metrics, precisions and Trainer flags work with this model."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from small_runs import BATCHES, MOMENTUM, Rows, classifier, fitted, float16, same, shapes_data, weights
from torchmetrics.classification import MulticlassAccuracy

from cifar_lit.features.weight_average import WeightAverage
from cifar_lit.training.checkpoint import read_checkpoint

# ---- metrics


def test_an_additional_metric_reaches_score_loggers_and_callbacks(tmp_path: Path) -> None:
    metric = {"top5": MulticlassAccuracy(num_classes=10, top_k=5, average="micro")}
    rows, model, data = Rows(), classifier(metrics=metric), shapes_data(eval_batch_size=7)
    best = ModelCheckpoint(tmp_path / "best", filename="best", monitor="val/top5", mode="max")
    done = fitted(model, data, best, logger=rows)
    assert model.score is not None and set(model.score.further) == {"top5"}
    val = rows.curve("val/top5")
    assert list(val) == [BATCHES, 2 * BATCHES]
    assert float(done.callback_metrics["val/top5"]) == val[2 * BATCHES] == model.score.further["top5"]
    assert float(best.best_model_score) == pytest.approx(max(val.values()))
    checkpoint = read_checkpoint(tmp_path / "best" / "best.ckpt")
    assert checkpoint["cifar_lit"]["score"]["further"] == {"top5": float(best.best_model_score)}
    assert not any("top5" in name for name in checkpoint["state_dict"])  # the weights fit a model without the metric

    resumed = classifier(metrics=metric)
    fitted(resumed, data, resume=tmp_path / "best" / "best.ckpt", max_epochs=3)
    assert resumed.score is not None and set(resumed.score.further) == {"top5"}


# ---- the Trainer's flags


@pytest.mark.parametrize(
    ("settings", "steps", "validations"),
    [({"val_check_interval": 0.5, "max_steps": 10}, 10, 3), ({"overfit_batches": 2}, 4, 2)],
)
def test_trainer_limits_count_batches_and_updates(settings: dict[str, Any], steps: int, validations: int) -> None:
    rows, counts = Rows(), list[bool]()
    count = LambdaCallback(on_validation_end=lambda trainer, _: counts.append(not trainer.sanity_checking))
    done = fitted(classifier(), shapes_data(), count, logger=rows, **settings)
    assert (done.global_step, sum(counts)) == (steps, validations)
    assert all(loss == loss for loss in rows.curve("train/loss").values())
    assert len(rows.curve("val/loss")) == validations


def test_validation_and_anomaly_detection_change_no_weights_or_logged_losses() -> None:
    ends = []
    for settings in ({}, {"val_check_interval": 3, "detect_anomaly": True}):
        rows, model = Rows(), classifier(**MOMENTUM)
        fitted(model, shapes_data(), WeightAverage(0.9), logger=rows, log_every_n_steps=2, **settings)
        ends.append((weights(model), rows.curve("train/loss")))
    assert same(ends[0][0], ends[1][0]) and ends[0][1] == ends[1][1]


@pytest.mark.parametrize("precision", ["bf16-true", "16-mixed"])
def test_other_precisions_train_and_score_like_float32(precision: Any) -> None:
    """Losses that are scaled for float16 are unscaled before clipping and logging."""
    exact, model, reference, rows = classifier(net="signs_mlp"), classifier(net="signs_mlp"), Rows(), Rows()
    before = weights(model)
    settings: dict[str, Any] = {"gradient_clip_val": 1e-2, "log_every_n_steps": 1, "max_epochs": 1}
    fitted(exact, shapes_data(), logger=reference, **settings)
    own = float16(init_scale=256.0) if precision == "16-mixed" else {"precision": precision}
    fitted(model, shapes_data(), logger=rows, **settings, **own)
    for name in ("train/loss", "val/loss"):
        assert rows.curve(name) == pytest.approx(reference.curve(name), rel=0.02)
    if precision != "bf16-true":  # bf16-true rounds the weights
        for name, tensor in weights(exact).items():
            assert (weights(model)[name] - tensor).norm() <= 0.05 * (tensor - before[name]).norm(), name
