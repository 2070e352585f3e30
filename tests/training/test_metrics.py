"""Metrics are exact in any order and batch size of images, and each image's prediction is stored once."""

import math
from pathlib import Path

import pytest
import torch
from small_runs import classifier, fitted, shapes_data, trainer
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassCalibrationError,
    MulticlassF1Score,
)

from cifar_lit.base.errors import UsageError
from cifar_lit.data.image_set import ImageSet
from cifar_lit.run.predictions import prediction_table, write_predictions
from cifar_lit.training.checkpoint import best_checkpoint, last_checkpoint, read_checkpoint
from cifar_lit.training.metrics import ClassEvaluation, Evaluation, LabelEvaluation, MeanLoss, PredictionCollector
from cifar_lit.training.score import Score

LOGITS = 4 * torch.randn(500, 7, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(0, 7, (500,), generator=torch.Generator().manual_seed(1))


def evaluate(logits: Tensor, labels: Tensor, batch_size: int) -> Score:
    evaluation = ClassEvaluation(7)
    for part, answers in zip(logits.split(batch_size), labels.split(batch_size), strict=True):
        evaluation.update(part, answers)
    return evaluation.compute()


def test_loss_and_accuracies_equal_torchs_over_all_images() -> None:
    score = evaluate(LOGITS, LABELS, batch_size=64)
    assert score.images == 500
    for name, metric in {
        "accuracy": MulticlassAccuracy(7, average="micro"),
        "balanced_accuracy": MulticlassAccuracy(7, average="macro"),
        "macro_f1": MulticlassF1Score(7, average="macro"),
        "top5": MulticlassAccuracy(7, top_k=5, average="micro"),
    }.items():
        assert score.values[name] == pytest.approx(float(metric(LOGITS, LABELS)), abs=1e-6), name
    assert score.per_class == pytest.approx(MulticlassAccuracy(7, average="none")(LOGITS, LABELS).tolist(), abs=1e-7)
    assert score.loss == pytest.approx(float(F.cross_entropy(LOGITS.double(), LABELS)), abs=1e-6)
    assert [sum(row) for row in score.confusion] == torch.bincount(LABELS, minlength=7).tolist()


@pytest.mark.parametrize(("evaluation", "labels"), [(ClassEvaluation, LABELS), (LabelEvaluation, (LOGITS > 2).float())])
def test_a_pass_begins_anew(evaluation: type[Evaluation], labels: Tensor) -> None:
    fresh, used = evaluation(7), evaluation(7)
    used.update(-LOGITS, labels)
    used.reset()
    for each in (fresh, used):
        each.update(LOGITS[:99], labels[:99])
    assert fresh.compute() == used.compute()


def test_top5_needs_six_classes() -> None:
    few, many = ClassEvaluation(5), ClassEvaluation(6)
    assert (few.names, many.names) == (few.names, [*few.names, "top5"]) and "top5" not in few.names
    few.update(torch.zeros(2, 5), torch.tensor([0, 1]))
    assert list(few.compute().values) == few.names
    many.update(torch.tensor([[5.0, 4, 3, 2, 1, 0]] * 3), torch.tensor([4, 5, -1]))
    assert many.compute().top5 == 1 / 2
    assert list(many.compute().values) == many.names


def test_order_batch_size_and_padding_do_not_change_the_last_digit() -> None:
    for batch_size in (1, 17, 500):
        order = torch.randperm(500, generator=torch.Generator().manual_seed(batch_size))
        assert evaluate(LOGITS[order], LABELS[order], batch_size) == evaluate(LOGITS, LABELS, 100)
    padded, answers = torch.cat([LOGITS, torch.full((30, 7), 50.0)]), torch.cat([LABELS, torch.full((30,), -1)])
    assert evaluate(padded, answers, 53) == evaluate(LOGITS, LABELS, 53)
    assert evaluate(LOGITS.bfloat16(), LABELS, 100) == evaluate(LOGITS.bfloat16().float(), LABELS, 100)


@pytest.mark.parametrize(
    ("losses", "counted", "mean"),
    [
        ([1.0, math.inf, 1.0], [True, True, True], math.nan),
        ([1.0, 1e30, 1.0], [True, True, True], math.nan),
        ([2.0, math.nan, 4.0], [True, False, True], 3.0),  # padding may be anything
        ([3e5, 1e5, 2e5], [True, True, True], 2e5),  # a diverged net
        ([0.1] * 10_000, [True] * 10_000, 0.1),  # small losses are not rounded away in the sum
    ],
)
def test_mean_loss_skips_padding_and_overflows_to_nan(losses: list[float], counted: list[bool], mean: float) -> None:
    metric = MeanLoss()
    for _ in range(50):
        metric.update(torch.tensor(losses), torch.tensor(counted))
    assert float(metric.compute()) == pytest.approx(mean, rel=1e-6, abs=5e-7, nan_ok=True)


def test_a_device_with_only_padding_gathers_empty_states_of_the_right_shape() -> None:
    evaluation = ClassEvaluation(7, {"auroc": MulticlassAUROC(7), "micro": MulticlassAccuracy(7, average="micro")})
    evaluation.update(LOGITS[:5], torch.full((5,), -1))
    auroc, micro = (evaluation.further[name] for name in ("auroc", "micro"))
    states = [(tensor.shape, tensor.dtype) for tensor in (*auroc.preds, *auroc.target)]
    assert states == [((0, 7), torch.float32), ((0,), torch.int64)]
    assert not micro.update_called
    evaluation.update(LOGITS, LABELS)
    assert evaluation.compute().further["auroc"] == pytest.approx(float(MulticlassAUROC(7)(LOGITS, LABELS)), abs=1e-6)


def test_without_images_a_class_has_no_accuracy_and_a_set_no_score() -> None:
    score = evaluate(LOGITS, torch.zeros_like(LABELS), batch_size=100)
    assert score.per_class[0] == score.accuracy
    assert all(math.isnan(accuracy) for accuracy in score.per_class[1:])
    missing = Score(0.9, 0.1, 20, [0.8, 1.0, math.nan], [[8, 0, 2], [0, 10, 0], [0, 0, 0]]).values
    assert (missing["macro_f1"], missing["balanced_accuracy"]) == (0.944444, 0.9)
    empty = ClassEvaluation(3).compute()
    assert math.isnan(empty.accuracy) and math.isnan(empty.loss) and empty.images == 0


# ---- the best checkpoint


def score(loss: float, *right: int) -> Score:
    """Return the score for the numbers of correct predictions, of 10 images of class 0 and 2 of class 1."""
    first, second = right
    confusion = [[first, 10 - first], [2 - second, second]]
    return Score((first + second) / 12, loss, 12, [first / 10, second / 2], confusion)


SCORES = [score(0.5, 6, 1), score(0.75, 10, 0), score(1.0, 7, 2), score(math.nan, 10, 2)]


@pytest.mark.parametrize(("monitor", "best"), [("accuracy", 1), ("loss", 0), ("balanced_accuracy", 2), ("macro_f1", 2)])
def test_the_monitored_score_selects_the_best_finite_checkpoint(tmp_path: Path, monitor: str, best: int) -> None:
    scores, done = iter(SCORES), 0
    while done < len(SCORES):  # in two parts: the second resumes the first
        model = classifier(monitor=monitor)
        model.evaluation.compute = lambda: next(scores)  # type: ignore[method-assign]
        saved, last = best_checkpoint(*model.monitored), last_checkpoint()
        saved.dirpath = last.dirpath = str(tmp_path)
        resume = tmp_path / "last.ckpt" if done else None
        done += 2
        fitted(model, shapes_data(), saved, last, max_epochs=done, resume=resume)
    assert read_checkpoint(tmp_path / "best.ckpt")["epoch"] == best
    assert float(saved.best_model_score) == pytest.approx(SCORES[best].values[monitor])


def test_a_users_metric_is_monitored_in_its_own_direction() -> None:
    metrics = {"calibration_error": MulticlassCalibrationError(10)}
    assert classifier(metrics=metrics, monitor="calibration_error").monitored == ("val/calibration_error", "min")
    assert classifier(monitor="top5").monitored == ("val/top5", "max")
    with pytest.raises(
        UsageError, match=r"one of accuracy, .*, top5, calibration_error, not 'calibration'\. Did you mean c"
    ):
        classifier(metrics=metrics, monitor="calibration")
    with pytest.raises(UsageError, match=r"macro_f1, not 'top5'"):
        classifier(num_classes=5, monitor="top5")


# ---- predictions


def test_predictions_have_each_image_once_in_order_without_padding() -> None:
    collector, logits = PredictionCollector(), torch.randn(6, 3)
    collector.update(logits[[4, 1, 0]], torch.tensor([2, 1, 0]), torch.tensor([4, 1, 0]))
    collector.update(logits[[0, 0]], torch.tensor([-1, -1]), torch.tensor([0, 0]))
    collector.update(logits[[5, 2]].bfloat16(), torch.tensor([0, 2]), torch.tensor([5, 2]))
    predictions = collector.compute()
    assert predictions["indices"].tolist() == [0, 1, 2, 4, 5]
    assert predictions["labels"].tolist() == [0, 1, 2, 2, 0]
    torch.testing.assert_close(predictions["probabilities"][[0, 1, 3]], F.softmax(logits[[0, 1, 4]].double(), 1))


def test_a_test_stores_each_prediction_and_a_fit_none(tmp_path: Path) -> None:
    model, data = classifier(), shapes_data(count=100, eval_batch_size=7)
    done = fitted(model, data, max_epochs=1)
    assert model.predictions is None
    done.test(model, datamodule=data, verbose=False)
    assert model.predictions is not None and model.score is not None
    assert torch.equal(model.predictions["labels"], data.test_images.labels)
    hits = model.predictions["probabilities"].argmax(1) == model.predictions["labels"]
    assert float(hits.double().mean()) == pytest.approx(model.score.accuracy)

    whole = data.test_images
    data.parts.test_images = ImageSet(whole.images[:1], whole.labels[:1], whole.classes)  # scalars in torchmetrics
    trainer().test(model, datamodule=data, verbose=False)
    table = prediction_table(model.predictions)
    assert (table.indices.tolist(), table.labels.tolist()) == ([0], whole.labels[:1].tolist())
    assert write_predictions(tmp_path / "predictions.csv", [model.predictions], data.test_images) == 1
