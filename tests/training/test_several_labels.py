"""Images with several labels: loss, scores, thresholds, and a run from the training to its predictions."""

import json
import math
from pathlib import Path

import lightning as L
import pytest
import torch
from contract.command_line import config_of, rows_of, run_command
from jsonschema import Draft202012Validator
from small_runs import fitted, shapes_data, trainer
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MultilabelAUROC, MultilabelExactMatch

from cifar_lit import ImageClassifier, load, save
from cifar_lit.base.errors import UsageError
from cifar_lit.base.stats import wilson_interval
from cifar_lit.data.image_set import Batch
from cifar_lit.features.class_weights import ClassWeights
from cifar_lit.run.label_results import label_results
from cifar_lit.training.checkpoint import last_checkpoint
from cifar_lit.training.label_scores import average_precision, label_scores
from cifar_lit.training.metrics import LabelEvaluation
from cifar_lit.training.score import Score
from cifar_lit.training.task import SeveralLabels

TASK = SeveralLabels()
LOGITS = torch.randn(300, 3, generator=torch.Generator().manual_seed(0)).round(decimals=1) + 0.05  # some are equal
LABELS = (LOGITS + torch.randn(300, 3, generator=torch.Generator().manual_seed(1)) > 0.5).float()
UNKNOWN = LABELS.where(torch.rand(300, 3, generator=torch.Generator().manual_seed(2)) > 0.2, -1.0)


def evaluate(logits: Tensor, labels: Tensor, batch_size: int = 64) -> Score:
    evaluation = LabelEvaluation(labels.shape[1])
    for part, answers in zip(logits.split(batch_size), labels.split(batch_size), strict=True):
        evaluation.update(part, answers)
    return evaluation.compute()


def precision_at_each_hit(values: Tensor, has: Tensor) -> float:
    """Return the average precision by its definition, the mean precision at the images that have the label."""
    precisions = [float(has[values >= value].mean()) for value in values[has == 1]]
    return sum(precisions) / len(precisions)


def test_average_precision_is_the_mean_precision_at_the_images_that_have_the_label() -> None:
    score = evaluate(LOGITS, UNKNOWN)
    known = [UNKNOWN[:, label] >= 0 for label in range(3)]
    expected = [precision_at_each_hit(LOGITS[rows, label], UNKNOWN[rows, label]) for label, rows in enumerate(known)]
    assert score.per_class == pytest.approx(expected, abs=1e-6)
    assert score.values["mean_average_precision"] == pytest.approx(sum(expected) / 3, abs=1e-6)
    own, _ = label_results(LOGITS.sigmoid(), UNKNOWN, [0.5] * 3, "abc").values()
    assert [row["average_precision"] for row in own.values()] == pytest.approx(expected, abs=1e-6)  # type: ignore[attr-defined]


def test_scores_count_known_labels_at_a_probability_of_one_half() -> None:
    logits = torch.tensor([[2.0, -1, 3], [-1.0, 2, -2], [1.0, 1, -1]])
    labels = torch.tensor([[1.0, 0, 1], [-1.0, 0, 0], [0.0, 1, 0]])
    score = evaluate(logits, labels, batch_size=2)
    # Hits a 1 of 1 (one surplus), b 1 of 1 (one surplus), c 1 of 1; only the first image is all right.
    assert score.values["macro_f1"] == pytest.approx((2 / 3 + 2 / 3 + 1) / 3, abs=1e-6)
    assert score.values["micro_f1"] == pytest.approx(6 / 8, abs=1e-6)
    assert score.values["hamming_loss"] == pytest.approx(2 / 8, abs=1e-6)
    assert score.accuracy == pytest.approx(1 / 3) and score.images == 3
    labels[1, 1] = -1  # surplus before, unknown now: the second image has no wrong label left
    assert evaluate(logits, labels).accuracy == pytest.approx(2 / 3)
    own = F.binary_cross_entropy_with_logits(logits, labels.clamp_min(0), reduction="none")
    means = [own[0].mean(), own[1, 1:].mean(), own[2].mean()]
    assert score.loss == pytest.approx(float(sum(means)) / 3, abs=1e-6)


def test_unknown_labels_and_padding_change_nothing() -> None:
    noise = torch.where(UNKNOWN < 0, torch.randn(300, 3) * 9, LOGITS)
    padding = torch.full((5, 3), -1.0)
    plain, other = evaluate(LOGITS, UNKNOWN), evaluate(torch.cat((noise, padding)), torch.cat((UNKNOWN, padding)))
    assert plain.values == other.values and plain.images == other.images
    assert torch.equal(TASK.loss(LOGITS, UNKNOWN, 0.1, "none"), TASK.loss(noise, UNKNOWN, 0.1, "none"))


def test_smoothing_moves_targets_to_one_half() -> None:
    losses = TASK.loss(LOGITS, LABELS, 0.2, "none")
    expected = F.binary_cross_entropy_with_logits(LOGITS, 0.8 * LABELS + 0.1, reduction="none").mean(1)
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(TASK.loss(LOGITS, LABELS, 0.2, "mean"), expected.mean())


def test_thresholds_have_the_largest_f1_or_reach_a_precision_with_the_largest_recall() -> None:
    probabilities = LOGITS.sigmoid()

    def f1(threshold: float, label: int) -> float:
        given, has = probabilities[:, label] >= threshold, LABELS[:, label] == 1
        return float(2 * (given & has).sum() / (given.sum() + has.sum()))

    for label, threshold in enumerate(TASK.thresholds(probabilities, LABELS)):
        assert f1(threshold, label) == max(f1(float(value), label) for value in probabilities[:, label])
    for label, threshold in enumerate(SeveralLabels(precision=0.8).thresholds(probabilities, LABELS)):
        has = LABELS[:, label] == 1
        precise = []
        for value in [threshold, *probabilities[:, label].tolist()]:
            given = probabilities[:, label] >= value
            if (given & has).sum() / given.sum() >= 0.8:
                precise.append(int((given & has).sum()))
        assert precise[0] == max(precise)
    assert TASK.thresholds(probabilities, torch.zeros(300, 3)) == [0.5] * 3
    worst = probabilities.argmax(0)
    hopeless = LABELS.clone()
    hopeless[worst, range(3)] = 0
    assert SeveralLabels(precision=1.0).thresholds(probabilities, hopeless) == [1.0] * 3


def test_intervals_contain_the_value_and_narrow_with_more_images() -> None:
    widths = []
    for copies in (1, 9):
        values, labels = LOGITS.sigmoid().repeat(copies, 1), LABELS.repeat(copies, 1)
        results = label_results(values, labels, [0.5] * 3, "abc")
        scores: dict[str, list[float]] = results["at_thresholds"]  # type: ignore[assignment]
        assert all(low <= value <= high for value, low, high in scores.values())
        widths.append([high - low for _, low, high in scores.values()])
        score = evaluate(LOGITS, LABELS)
        assert [each[0] for each in scores.values()] == pytest.approx(
            [score.values[name] for name in scores], abs=2e-6
        )  # fmt: skip
    assert all(2.4 < first / second < 3.6 for first, second in zip(*widths, strict=True))  # √9
    wilson = wilson_interval(round(300 * score.accuracy), 300)
    assert widths[0][-1] == pytest.approx(wilson[1] - wilson[0], rel=0.2)


def test_weights_stand_for_copies_of_an_image() -> None:
    values, has = LOGITS[:40, 0].sigmoid().double().numpy(), (LABELS[:40, 0] == 1).numpy()
    counts = torch.randint(0, 4, (40,), generator=torch.Generator().manual_seed(3)).numpy()
    copied = average_precision(values.repeat(counts), has.repeat(counts), torch.ones(1, counts.sum()).numpy())
    assert average_precision(values, has, counts[None]) == pytest.approx(copied)


def test_metrics_of_a_user_get_the_known_labels_as_integers() -> None:
    metrics = {"auroc": "torchmetrics.classification.MultilabelAUROC", "exact": MultilabelExactMatch}
    evaluation = LabelEvaluation(3, metrics)  # type: ignore[arg-type]
    padding = torch.full((4, 3), -1.0)
    evaluation.update(torch.cat((LOGITS, padding)), torch.cat((LABELS, padding)))
    evaluation.update(padding, padding)
    values = evaluation.compute().values
    assert values["auroc"] == pytest.approx(float(MultilabelAUROC(3)(LOGITS, LABELS.long())))
    assert values["exact"] == pytest.approx(evaluate(LOGITS, LABELS).accuracy)


def test_samples_without_a_rare_label_count_the_others() -> None:
    labels = torch.cat((LABELS, torch.zeros(300, 1)), 1)
    labels[0, 3] = 1
    values = torch.cat((LOGITS, torch.full((300, 1), -1.0)), 1).sigmoid()
    weights = torch.ones(2, 300).int().numpy()
    weights[0, 0] = 0
    totals = label_scores(values, labels, 0.5, weights).totals
    without = label_scores(values[1:, :3], labels[1:, :3], 0.5, weights[:1, 1:]).totals
    for name in ("mean_average_precision", "macro_f1"):
        assert totals[name][0] == pytest.approx(without[name][0])
    results = label_results(values, labels, [0.5] * 4, "abcd")
    assert all(math.isfinite(end) for row in results["labels"].values() for end in row["interval"])  # type: ignore[attr-defined]


def test_a_checkpoint_knows_that_its_labels_are_several(tmp_path: Path) -> None:
    data = shapes_data(figures=2)
    last = last_checkpoint()
    last.dirpath = str(tmp_path)
    model = ImageClassifier("lenet")
    fitted(model, data, last, max_epochs=1)
    loaded = ImageClassifier.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(loaded.eval().predict_step(images, 0)["probabilities"], loaded(images).sigmoid())
    assert loaded.monitored == ("val/mean_average_precision", "max")
    again = ImageClassifier("lenet")
    fitted(again, shapes_data(figures=2), resume=tmp_path / "last.ckpt", max_epochs=2)
    assert again.current_epoch == 2


def test_any_loader_with_float_targets_trains() -> None:
    images = torch.randn(64, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    targets = torch.stack((images.mean((1, 2, 3)) > 0, images[:, 0, :, :8].mean((1, 2)) > 0), 1).float()
    loader = DataLoader(TensorDataset(images, targets), batch_size=16)
    torch.manual_seed(0)
    model = ImageClassifier("signs_mlp", [3, 16, 16], 2, lr=0.1, task=SeveralLabels())
    done = trainer(max_epochs=20)
    done.fit(model, loader)
    (scores,) = done.test(model, loader, verbose=False)
    assert scores["test/mean_average_precision"] > 0.95
    assert model.monitored == ("val/mean_average_precision", "max")
    assert ImageClassifier("lenet", [3, 32, 32], 2, task=TASK, monitor="hamming_loss").monitored[1] == "min"


@pytest.mark.parametrize("task", [None, TASK])
def test_labels_of_the_other_task_are_refused(task: SeveralLabels | None) -> None:
    targets = torch.zeros(8, 2) if task is None else torch.zeros(8, dtype=torch.int64)
    loader = DataLoader(TensorDataset(torch.randn(8, 3, 16, 16), targets), batch_size=4)
    model, done = ImageClassifier("lenet", [3, 16, 16], 2, task=task), trainer(max_epochs=1)
    for run in (done.fit, done.validate):
        with pytest.raises(
            UsageError, match=r"float \(B, classes\) with .*SeveralLabels\(\)\), else int64 \(B,\), not torch"
        ):
            run(model, loader)


@pytest.mark.parametrize("augment", [{"mixup": 1.0}, {"cutmix": 1.0}, {}])
def test_mixing_and_class_weights_train_with_unknown_labels(augment: dict[str, float]) -> None:
    data = shapes_data(figures=3, augment=augment)
    data.train_images.labels[:, 0] = -1
    model = ImageClassifier("lenet", lr=0.05)
    fitted(model, data, ClassWeights(), max_epochs=1)
    assert model.score is not None and math.isnan(model.score.per_class[0]) and math.isfinite(model.score.loss)


def test_mixed_targets_are_shares_of_labels_and_unknown_if_either_is() -> None:
    data = shapes_data(figures=3, augment={"mixup": 1.0})
    data.train_images.labels[::3, 1] = -1
    fitted(ImageClassifier("lenet"), data, max_epochs=1, limit_train_batches=1)
    (batch, *_) = data.train_loader
    unknown = int((batch.labels[:, 1] == -1).sum())
    mixed = data.preprocessing.train_batch(batch).targets
    assert mixed is not None and unknown < int((mixed[:, 1] == -1).sum()) <= 2 * unknown < 2 * len(mixed)
    others = mixed[:, [0, *range(2, 10)]]
    assert others.min() >= 0 and others.max() <= 1 and ((mixed[:, 1] >= 0) | (mixed[:, 1] == -1)).all()
    assert ((others > 0) & (others < 1)).any()


def test_a_class_weight_of_an_image_is_the_mean_of_those_of_its_labels() -> None:
    feature = ClassWeights()
    feature.weights = torch.tensor([1.0, 3.0, 8.0])
    labels = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [-1.0, 0.0, 1.0]])
    weighed = feature.weigh(torch.ones(3), torch.empty(0), Batch(torch.empty(0), labels, torch.arange(3)))
    assert weighed.tolist() == [2.0, 1.0, 8.0]


WORDS = "--recipe quickstart --data.figures 2 --data.count 600 --data.num_classes 3 --epochs 1"


def test_a_run_states_its_labels_everywhere_alike(working_folder: Path) -> None:
    answer = run_command("train", *WORDS.split(), "--model.task.precision", "0.9")
    assert answer.code == 0, answer.err
    assert "test average precision per class" in answer.out and " · micro F1 0." in answer.out
    run = Path("lightning_logs/quickstart-1")
    metrics = json.loads((run / "metrics.json").read_text())
    schema = Path(__file__).parents[2] / "docs/schema/metrics.schema.json"
    assert not list(Draft202012Validator(json.loads(schema.read_text())).iter_errors(metrics))
    test = metrics["test"]
    assert {*test["labels"]} == {*test["per_class"]} == {"circle", "square", "triangle"}
    rows = rows_of(run / "predictions.csv")
    assert len(rows) == test["images"] == 120
    assert {"|" in row["label"] for row in rows} == {True, False}
    classifier = load(run)
    thresholds = classifier.card.thresholds
    assert thresholds == [row["threshold"] for row in test["labels"].values()]
    for row in rows[:50]:
        own = [name for name, least in zip(classifier.classes, thresholds, strict=True)
               if float(row[f"probability_{name}"]) >= least]  # fmt: skip
        assert row["predicted"] == "|".join(own)
    right = sum(row["label"] == row["predicted"] for row in rows) / len(rows)
    assert test["at_thresholds"]["accuracy"][0] == pytest.approx(right, abs=1e-6)
    assert config_of(run)["model"]["task"] == {"precision": 0.9}
    page = (run / "report.html").read_text()
    assert "Numbers of each label" in page and "mean average precision" in page
    for command in (f"test {run}", f"report {run}", f"export {run} --to torch-export", f"compare {run} {run}"):
        assert run_command(*command.split()).code == 0, command
    for number, command in enumerate(("predict", "test"), 2):  # with the thresholds of the training, above 1/2
        assert run_command(command, "--ckpt_path", run / "checkpoints/last.ckpt").code == 0, command
        again = rows_of(run.with_name(f"quickstart-{number}") / "predictions.csv")
        assert [row["predicted"] for row in again] == [row["predicted"] for row in rows]


def test_a_cross_validation_gives_each_image_the_labels_above_the_thresholds_of_its_net(working_folder: Path) -> None:
    answer = run_command("train", *WORDS.split(), "--folds", "2")
    first, second, both = (
        {tuple(row.values())[1:] for row in rows_of(Path(f"lightning_logs/quickstart-{name}/predictions.csv"))}
        for name in ("1", "2", "folds-1")
    )
    assert first | second == both
    assert " of 1800 labels contradict the predictions: " in answer.out


def test_predictions_are_the_labels_above_their_thresholds(working_folder: Path) -> None:
    data = shapes_data(figures=3, num_classes=4)
    model = ImageClassifier("lenet", lr=0.05)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    fit = L.Trainer(max_epochs=1, **quiet)  # type: ignore[arg-type]
    fit.fit(model, data)
    save(model, data, "mine")
    classifier = load("mine")
    images = data.test_images.images[:6].permute(0, 3, 1, 2)
    probabilities = classifier(images).sigmoid()
    classifier.card.thresholds[:] = [0.0, 1.0, float(probabilities[0, 2]), 1.0]  # type: ignore[index]
    for prediction, values in zip(classifier.predict_batch(images), probabilities, strict=True):
        names = ["circle"] + ["triangle"] * bool(values[2] >= probabilities[0, 2])
        assert sorted(prediction.label.split("|")) == sorted(prediction.prediction_set or ()) == sorted(names)
        assert prediction.probability == pytest.approx(float(values.max())) and prediction.unknown is None
