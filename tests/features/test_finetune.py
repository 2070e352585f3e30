"""Fine-tuning: pretrained weights, the head fitted on features of the frozen net, then training of all weights."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from safetensors.torch import load_file, save_file
from small_runs import At, Rows, best_and_last, classifier, fitted, same, shapes_data, weights
from torch import Tensor, nn
from torch.nn import functional as F

from cifar_lit.data.datamodule import ImageData
from cifar_lit.features import finetune
from cifar_lit.features.finetune import Finetune, fit_head, out_of_fold
from cifar_lit.features.weight_average import WeightAverage
from cifar_lit.inference.logits import FEATURES, OUT_OF_FOLD
from cifar_lit.inference.model_file import ModelCard, save_weights
from cifar_lit.models.registry import build_net
from cifar_lit.runs.label_errors import rank_labels
from cifar_lit.training.classifier import ImageClassifier


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Return a file of weights of a net for ten classes of colour images."""
    net = build_net("shapenet", channels=3, image_size=16, num_classes=10)
    save_file(net.state_dict(), tmp_path / "weights.safetensors")
    return str(tmp_path / "weights.safetensors")


@pytest.fixture
def data() -> ImageData:
    return shapes_data(augment={"flip": "random", "crop": 2})


def model(lr: float = 1e-3, **settings: Any) -> ImageClassifier:
    return classifier(**{"net": "shapenet", "optimizer": "adamw", "lr": lr, **settings})


def net_part(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of the net in the state of its module."""
    return {name.removeprefix("net."): value for name, value in state.items() if name.startswith("net.")}


# ---- the head


def test_the_head_minimises_its_loss() -> None:
    torch.manual_seed(0)
    features, labels = torch.randn(200, 12) * torch.logspace(-2, 2, 12) + 5, torch.arange(200) % 3
    features[labels == 1, 3] += 2 * features[:, 3].std()
    weight, bias = fit_head(features.half(), labels, 3)
    rows = features.half().float()
    scaled = (weight * rows.std(0)).requires_grad_()
    standardised = (rows - rows.mean(0)) / rows.std(0)
    shifted = (bias + weight @ rows.mean(0)).requires_grad_()
    F.cross_entropy(standardised @ scaled.T + shifted, labels).backward()
    assert scaled.grad is not None and shifted.grad is not None
    torch.testing.assert_close(shifted.grad, torch.zeros(3), atol=1e-4, rtol=0)
    # At the minimum, the gradient of the penalty (strength · weight) cancels the gradient of the loss.
    strength = -(scaled.grad * scaled.detach()).sum() / scaled.detach().square().sum()
    assert any(abs(float(strength) - candidate) < 0.05 * candidate for candidate in finetune.STRENGTHS)
    torch.testing.assert_close(-scaled.grad, strength * scaled.detach(), atol=1e-3, rtol=0)


def test_the_penalty_is_chosen_even_with_three_images_per_class() -> None:
    torch.manual_seed(0)
    labels = torch.arange(12) % 4
    features = torch.randn(12, 8) + 9 * F.one_hot(labels, 8)
    weight, bias = fit_head(features, labels, 4)
    confidences = (features @ weight.T + bias).softmax(1)[range(12), labels]
    assert float(confidences.min()) > 0.95  # far above those of the strongest penalty
    noise, _ = fit_head(torch.randn(12, 8), labels, 4)
    assert noise.norm() < weight.norm()


def planted(classes: int = 3, wrong: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Return features in which classes are separable, labels with errors among them, and the rows of the errors."""
    torch.manual_seed(0)
    labels = torch.arange(90) % classes
    features = torch.randn(90, 200) + torch.randn(classes, 200)[labels]
    rows = torch.arange(0, 90, 90 // wrong)
    labels[rows] = (labels[rows] + 1) % classes
    return features, labels, rows


def test_wrong_labels_that_a_head_memorises_rank_first_out_of_fold() -> None:
    features, labels, wrong = planted()
    weight, bias = fit_head(features, labels, 3)
    memorised = (features @ weight.T + bias).softmax(1)
    assert rank_labels(labels, memorised).suspects == 0
    ranking = rank_labels(labels, out_of_fold(features, labels, 3))
    assert {*ranking.rows[: len(wrong)].tolist()} == {*wrong.tolist()}


def test_the_label_of_an_image_has_no_influence_on_its_own_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels, _ = planted()
    folds = torch.arange(90) // 3 % 5
    monkeypatch.setattr(finetune, "draw_folds", lambda *_: folds)
    before = out_of_fold(features, labels, 3)
    mates = folds == 2
    labels[mates] = 0
    features[mates & (torch.arange(90) > 45)] += 9  # nor have the features of other images of its fold
    after = out_of_fold(features, labels, 3)
    same_features = mates & (torch.arange(90) <= 45)
    assert torch.equal(before[same_features], after[same_features])
    assert not torch.equal(before[~mates], after[~mates])


def test_wrong_ones_of_several_labels_rank_first_out_of_fold() -> None:
    features, classes, _ = planted(wrong=1)
    labels = torch.stack([classes == 0, classes <= 1], 1).float()
    wrong = [(3, 0), (10, 1), (46, 0), (71, 1)]
    for row, label in wrong:
        labels[row, label] = 1 - labels[row, label]
    weight, bias = fit_head(features, labels, 2)
    assert rank_labels(labels, (features @ weight.T + bias).sigmoid()).suspects == 0
    ranking = rank_labels(labels, out_of_fold(features, labels, 2))
    assert ranking.pairs is not None
    assert {*map(tuple, ranking.pairs[ranking.rows[:5]].tolist())} >= {*wrong}


# ---- in a fit


@pytest.mark.parametrize("val_size", [20, 0])
def test_a_fit_writes_predictions_of_unseen_heads_for_the_images_that_it_uses(
    file: str, tmp_path: Path, val_size: int
) -> None:
    split = {"share": 0.5, "seed": 0}
    data = shapes_data(val_size=val_size, split=split, num_classes=3, augment={"flip": "random", "crop": 2})
    last = best_and_last(tmp_path / "checkpoints")[1]
    tuned = model(num_classes=3)
    fitted(tuned, data, Finetune(file, unfreeze=False), last, limit_val_batches=min(val_size, 1.0))
    written = torch.from_numpy(np.load(tmp_path / OUT_OF_FOLD))
    assert (written.dtype, tuple(written.shape)) == (torch.float32, (120, 3))
    used = torch.cat(data.split).sort().values
    assert written.isfinite().all(1).nonzero().flatten().tolist() == used.tolist() and len(used) < 120
    features = torch.from_numpy(np.load(tmp_path / FEATURES))  # for the images that `review` shows as similar
    rows = torch.cat(data.split)
    with torch.no_grad():  # features of the plain images
        plain = tuned.net.eval()[:-1](data.preprocessing.normalise(data.train_images.take(rows)))  # type: ignore[index]
    torch.testing.assert_close(features[rows].float(), plain, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(out_of_fold(features[rows], data.train_images.labels[rows], 3), written[rows])


@pytest.mark.parametrize("fit", [False, True])
@pytest.mark.parametrize("count", [10, 9])
def test_a_run_keeps_the_rows_of_its_classes_unless_the_head_is_fitted_on_further_ones(
    fit: bool, count: int, data: ImageData, tmp_path: Path
) -> None:
    card = ModelCard("shapenet", 1.0, [3, 16, 16], list(reversed(data.classes[:count])), [0.5], [0.25])
    old = build_net("shapenet", channels=3, image_size=16, num_classes=count)
    save_weights(tmp_path / "model.safetensors", old.state_dict(), card)
    tuned = model(lr=1e-9)
    fitted(tuned, data, Finetune(str(tmp_path), fit), max_epochs=1)
    kept = torch.allclose(tuned.net[-1].weight[:count], old[-1].weight.flip(0), atol=1e-5)  # type: ignore[index]
    assert kept == (count == 10 or not fit)


def test_a_fitted_head_of_a_net_without_norms_is_no_larger_than_the_one_it_replaces(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 8), nn.Linear(8, 10))
    nn.init.normal_(net[1].weight, std=1e-4)  # type: ignore[arg-type]
    torch.save(net.state_dict(), tmp_path / "a.pth")
    norm = net[2].weight.norm()
    tuning, fixed = (Finetune(str(tmp_path / "a.pth"), unfreeze=unfreeze) for unfreeze in (True, False))
    fitted(model(net=net, optimizer="sgd", lr=0.05), shapes_data(), tuning)  # a larger one makes the loss NaN
    assert net[2].weight.norm() < 2 * norm
    fitted(model(net=net), shapes_data(), fixed)
    assert net[2].weight.norm() > 10 * norm


def test_without_unfreezing_only_the_head_changes(file: str, data: ImageData, tmp_path: Path) -> None:
    tuned, before = model(), load_file(file)
    trainer = fitted(tuned, data, Finetune(file, unfreeze=False), *best_and_last(tmp_path))
    after = weights(tuned.net)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    last = len(tuned.net) - 1  # type: ignore[arg-type]
    assert changed == {f"{last}.weight", f"{last}.bias"} and trainer.global_step == 0
    assert tuned.score is not None and tuned.score.images == len(data.split[1])
    for name in ("best", "last"):
        saved = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["state_dict"]
        assert same(net_part(saved), after)


@pytest.mark.parametrize("average", [[], [WeightAverage(0.9)]], ids=["plain", "averaged"])
def test_the_head_stays_best_unless_training_helps(
    file: str, data: ImageData, tmp_path: Path, average: list[Callback]
) -> None:
    fitted(only_head := model(), data, Finetune(file, unfreeze=False))
    best, last = best_and_last(tmp_path)
    fitted(model(lr=100.0), data, Finetune(file), *average, best, last)  # the rate destroys the weights
    saved = torch.load(best.best_model_path, weights_only=True)
    assert same(net_part(saved["state_dict"]), weights(only_head.net))
    assert saved["global_step"] == 0 and last.best_model_path != best.best_model_path
    assert saved["cifar_lit"]["score"]["accuracy"] == pytest.approx(float(best.best_model_score))  # type: ignore[arg-type]


def test_resumed_fine_tuning_refits_no_head(file: str, data: ImageData, tmp_path: Path) -> None:
    whole, stopped, resumed = model(), model(), model()
    fitted(whole, data, Finetune(file, fixed_norms=True), *best_and_last(tmp_path / "a"))

    def stop(trainer: Any, _: Any) -> None:
        trainer.save_checkpoint(tmp_path / "stopped.ckpt")
        trainer.should_stop = True

    settings = {"augment": {"flip": "random", "crop": 2}}
    fitted(stopped, shapes_data(**settings), Finetune(file, fixed_norms=True), At(4, stop, after=True))
    fitted(resumed, shapes_data(**settings), Finetune(file, fixed_norms=True), resume=tmp_path / "stopped.ckpt")
    assert same(weights(whole), weights(resumed))


def test_fixed_norms_keep_their_statistics_and_train_their_scales(file: str, data: ImageData) -> None:
    for fixed in (True, False):
        tuned, before = model(), load_file(file)
        fitted(tuned, data, Finetune(file, not fixed, fixed_norms=fixed), max_epochs=1)
        after = weights(tuned.net)
        statistics = [name for name in before if "running" in name]
        assert statistics and all(torch.equal(before[name], after[name]) == fixed for name in statistics)
        assert not torch.equal(before["1.weight"], after["1.weight"])


@pytest.mark.parametrize("frozen", [0.0, 0.5])
def test_learning_rates_rise_in_equal_ratios_from_the_first_trained_layer_to_the_last(
    frozen: float, tmp_path: Path
) -> None:
    rows, sizes = Rows(), pairwise([3 * 16 * 16, *[2] * 7, 10])
    net = nn.Sequential(nn.Flatten(), *(nn.Linear(*pair) for pair in sizes))
    torch.save(net.state_dict(), tmp_path / "a.pth")
    tuning = Finetune(str(tmp_path / "a.pth"), fit_head=False, frozen=frozen, input_lr=1e-4)
    tuned = model(lr=1e-2, net=net, optimizer_options={"weight_decay": 0.1})
    groups = fitted(tuned, shapes_data(), tuning, logger=rows, max_epochs=1).optimizers[0].param_groups
    rates = {parameter: group["lr"] for group in groups for parameter in group["params"]}
    assert len(rates) == 16 * (1 - frozen)
    assert (min(rates.values()), max(rates.values())) == (pytest.approx(1e-4), pytest.approx(1e-2))
    assert {group["weight_decay"] for group in groups if group["role"] == "biases"} == {0.0}
    if not frozen:
        layers: list[Any] = list(net[1:])
        by_layer = [rates[layer.weight] for layer in layers]
        assert [later / earlier for earlier, later in pairwise(by_layer)] == pytest.approx([100 ** (1 / 7)] * 7)
        assert all(rates[layer.weight] == rates[layer.bias] for layer in layers)
        assert set(rows.curve("lr").values()) == {1e-2}  # the rate of the last layers
