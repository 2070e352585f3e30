"""Pretrained weights, the head on features of the frozen net, and training all weights from there."""

from __future__ import annotations

import itertools
import pickle
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file, save_file
from small_runs import At, best_and_last, fitted, same, shapes_data, weights
from torch import Tensor, nn
from torch.nn import functional as F

from cifar_lit.data.datamodule import ImageData
from cifar_lit.errors import Failure, UsageError
from cifar_lit.models.registry import build_net
from cifar_lit.training import finetune
from cifar_lit.training.classifier import ImageClassifier
from cifar_lit.training.finetune import fit_head, load_into, load_pretrained, net_head
from cifar_lit.training.optimizers import parameter_groups

SHAPE: dict[str, Any] = {"channels": 3, "image_size": 16, "num_classes": 10}


def shapenet(**settings: Any) -> nn.Module:
    return build_net("shapenet", **{**SHAPE, **settings})


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Weights of a net for ten classes of colour images."""
    torch.manual_seed(1)
    save_file(shapenet().state_dict(), tmp_path / "weights.safetensors")
    return str(tmp_path / "weights.safetensors")


@pytest.fixture
def data(tmp_path: Path) -> ImageData:
    return shapes_data(cache_dir=str(tmp_path / "cache"), flip="random", crop=2)


def model(file: str, **settings: Any) -> ImageClassifier:
    torch.manual_seed(0)
    made = ImageClassifier(
        "shapenet", [3, 16, 16], 10, **{"optimizer": "adamw", "lr": 1e-3, "weights": file, **settings}
    )
    load_into(made)
    return made


# ---- weights


def test_a_net_takes_pretrained_weights_all_but_a_head_for_other_classes(file: str, tmp_path: Path) -> None:
    pretrained, fresh = shapenet(), shapenet(num_classes=4)
    load_pretrained(pretrained, "shapenet", file)
    head = weights(fresh[-1])
    load_pretrained(fresh, "shapenet", file)
    assert same(weights(fresh[:-1]), weights(pretrained[:-1])) and same(weights(fresh[-1]), head)
    torch.save(
        {"epoch": 3, "state_dict": {f"module.{name}": value for name, value in pretrained.state_dict().items()}},
        tmp_path / "a.pth",
    )
    again = shapenet()
    load_pretrained(again, "shapenet", str(tmp_path / "a.pth"))
    assert same(weights(again), weights(pretrained))


def test_layers_of_ones_own_may_be_called_as_what_runs_put_before_names(tmp_path: Path) -> None:
    first, *others = (nn.Sequential(OrderedDict(net=nn.Linear(8, 4))) for _ in range(3))
    save_file(first.state_dict(), tmp_path / "own.safetensors")
    torch.save(
        {"state_dict": {f"net.{name}": value for name, value in first.state_dict().items()}}, tmp_path / "run.pth"
    )
    for other, name in zip(others, ("own.safetensors", "run.pth"), strict=True):
        load_pretrained(other, "own.Net", str(tmp_path / name))
        assert same(weights(other), weights(first))


def test_a_layer_whose_name_begins_as_the_heads_is_no_part_of_it(tmp_path: Path) -> None:
    net = nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 4, 3), fc1=nn.Linear(4, 4), fc=nn.Linear(4, 2)))
    torch.save(
        {name: tensor for name, tensor in net.state_dict().items() if not name.startswith("fc1.")}, tmp_path / "a.pth"
    )
    with pytest.raises(UsageError, match=r"2 of 6 tensors, such as fc1\.weight, are missing"):
        load_pretrained(net, "own", str(tmp_path / "a.pth"))


def test_grey_images_are_seen_as_colour_images_of_that_grey(file: str) -> None:
    colour, grey, images = shapenet(), shapenet(channels=1), torch.rand(2, 1, 16, 16)
    load_pretrained(colour, "shapenet", file)
    load_pretrained(grey, "shapenet", file)
    with torch.no_grad():
        torch.testing.assert_close(grey.eval()(images), colour.eval()(images.expand(-1, 3, -1, -1)))


def test_weights_that_cannot_be_meant_are_refused_in_one_line(file: str, tmp_path: Path) -> None:
    damaged, code, notes = tmp_path / "cut.safetensors", tmp_path / "code.pth", tmp_path / "notes.pth"
    damaged.write_bytes(Path(file).read_bytes()[:-9])
    code.write_bytes(pickle.dumps(print))
    torch.save({"notes": "none"}, notes)
    for path, error, line in (
        ("absent.pth", UsageError, "there are no weights absent.pth"),
        (str(damaged), Failure, "is damaged"),
        (str(code), Failure, "would execute code|damaged"),
        (str(notes), Failure, "holds no weights"),
    ):
        with pytest.raises(error, match=line):
            load_pretrained(shapenet(), "shapenet", path)
    with pytest.raises(UsageError, match=r"does not hold weights of shapenet: .* name their net with --net"):
        load_pretrained(shapenet(width=2.0), "shapenet", file)
    with pytest.raises(UsageError, match="shapenet has no pretrained weights"):
        load_pretrained(shapenet(), "shapenet", "imagenet")
    with pytest.raises(UsageError, match=r"set model\.weights"):
        ImageClassifier("shapenet", [3, 16, 16], 10, unfreeze=False)


# ---- the head


def test_the_head_is_the_minimum_of_its_loss() -> None:
    torch.manual_seed(0)
    features, labels = torch.randn(200, 12) * torch.logspace(-2, 2, 12) + 5, torch.arange(200) % 3
    features[labels == 1, 3] += 2 * features[:, 3].std()
    weight, bias, _ = fit_head(features.half(), labels, 3, views=1)
    rows = features.half().float()
    scaled = (weight * rows.std(0)).requires_grad_()
    standardised = (rows - rows.mean(0)) / rows.std(0)
    moved = (bias + weight @ rows.mean(0)).requires_grad_()
    F.cross_entropy(standardised @ scaled.T + moved, labels).backward()
    assert scaled.grad is not None and moved.grad is not None
    torch.testing.assert_close(moved.grad, torch.zeros(3), atol=1e-4, rtol=0)
    # where the penalty's gradient, strength · weight, is all that is left of it, with one of the strengths for all weights
    strength = -(scaled.grad * scaled.detach()).sum() / scaled.detach().square().sum()
    assert any(abs(float(strength) - known) < 0.05 * known for known in finetune.STRENGTHS)
    torch.testing.assert_close(-scaled.grad, strength * scaled.detach(), atol=1e-3, rtol=0)


def test_the_penalty_is_chosen_with_few_images_a_class_too() -> None:
    torch.manual_seed(0)
    labels = torch.arange(12) % 4
    features = torch.randn(12, 8) + 9 * F.one_hot(labels, 8)
    weight, bias, _ = fit_head(features, labels, 4, views=1)
    assert (
        float((features @ weight.T + bias).softmax(1)[range(12), labels].min()) > 0.95
    )  # far surer than with the strongest
    noise, _, _ = fit_head(torch.randn(12, 8), labels, 4, views=1)
    assert noise.norm() < weight.norm()


def test_views_of_one_image_are_held_out_together() -> None:
    """Labels are noise: only a copy of a held-out image among the fitted rows makes a weak penalty look better."""
    torch.manual_seed(0)
    features, labels = torch.randn(60, 100), torch.arange(60) % 2
    once, twice = (fit_head(features.repeat(views, 1), labels, 2, views=views).weight for views in (1, 2))
    torch.testing.assert_close(twice, once, rtol=0.05, atol=1e-3)


def test_of_very_many_features_some_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    labels = torch.arange(3000) % 2
    features = torch.randn(6000, 4) + labels.repeat(2)[:, None]
    seen: list[int] = []
    solve = finetune._solve
    monkeypatch.setattr(finetune, "_solve", lambda rows, *more: seen.append(len(rows)) or solve(rows, *more))  # type: ignore[func-returns-value]
    monkeypatch.setattr(finetune, "MAX_FITTED", 2500)
    head = fit_head(features, labels, 2, views=2)
    assert max(seen) == 2500
    assert ((features @ head.weight.T + head.bias).argmax(1) == labels.repeat(2)).float().mean() > 0.8


def test_rare_classes_have_their_share_by_class_weights() -> None:
    torch.manual_seed(0)
    labels = (torch.arange(300) % 30 == 0).long()
    features = torch.randn(300, 2) + labels[:, None]
    plain, weighted = (fit_head(features, labels, 2, 1, given) for given in (None, torch.tensor([0.5, 15.0])))
    rare = [((features @ head.weight.T + head.bias).argmax(1) == 1).sum() for head in (plain, weighted)]
    assert rare[0] < 10 < rare[1]


# ---- in a fit


def test_the_last_layer_alone_is_trained_where_nothing_is_unfrozen(file: str, data: ImageData, tmp_path: Path) -> None:
    tuned = model(file, unfreeze=False)
    before = weights(tuned.net)
    trainer = fitted(tuned, data, *best_and_last(tmp_path))
    after = weights(tuned.net)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    head = len(tuned.net) - 1  # type: ignore[arg-type]
    assert changed == {f"{head}.weight", f"{head}.bias"} and trainer.global_step == 0
    assert tuned.score is not None and tuned.score.images == len(data.split[1])
    for name in ("best", "last"):
        saved = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["state_dict"]
        assert same(
            {name.removeprefix("net."): value for name, value in saved.items() if name.startswith("net.")}, after
        )


def test_features_are_computed_once_for_runs_of_all_seeds(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, heads, compute = list[int](), [], finetune.compute_features

    def counted(*given: Any) -> Tensor:
        features = compute(*given)
        seen.append(len(features))
        return features

    monkeypatch.setattr(finetune, "compute_features", counted)
    for seed, width in ((0, 2), (1, 2), (0, 3)):
        data = shapes_data(cache_dir=str(tmp_path / "cache"), flip="random", crop=width, seed=seed)
        tuned = model(file, unfreeze=False)
        nn.init.constant_(tuned.net[-1].weight, seed)  # type: ignore[index]  # drawn by seed where it is for other classes
        fitted(tuned, data)
        heads.append(weights(tuned.net[-1]))  # type: ignore[index]
    train, val = map(len, data.split)
    assert seen == [train, train, val, train]  # plain and augmented, validation; only the other augmentation is new
    assert same(heads[0], heads[1]) and not same(heads[0], heads[2])


def test_each_view_has_features_of_its_own_in_the_cache(file: str, tmp_path: Path) -> None:
    data = shapes_data(cache_dir=str(tmp_path / "cache"), flip="random", crop=2)
    for _ in range(2):  # the second time from the cache
        fitted(model(file, unfreeze=False, head_views=3), data)
    views = [load_file(path)["features"] for path in (tmp_path / "cache").glob("features-*.safetensors")]
    of_training = [view for view in views if len(view) == len(data.split[0])]
    assert len(of_training) == 3
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(of_training, 2))


def test_features_are_those_of_the_nets_options(file: str, data: ImageData) -> None:
    pytest.importorskip("timm")
    heads = []
    for side in (32, 64):
        torch.manual_seed(0)
        settings: dict[str, Any] = {"weights": file, "unfreeze": False, "optimizer": "adamw", "lr": 1e-3}
        tuned = ImageClassifier("timm/resnet10t", [3, 16, 16], 10, net_options={"side": side}, **settings)
        tuned.is_pretrained = True  # its random weights serve as well
        fitted(tuned, data)
        heads.append(weights(net_head(tuned.net)))
    assert not same(*heads)


@pytest.mark.parametrize("settings", [{"precision": "bf16-true"}, {"compiles": True}])
def test_features_are_computed_in_other_precisions_and_for_compiled_nets(
    file: str, data: ImageData, settings: dict[str, Any]
) -> None:
    tuned = model(file, unfreeze=False, compile=settings.pop("compiles", False))
    fitted(tuned, data, **settings)
    assert tuned.score is not None and tuned.score.images == len(data.split[1])


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_training_all_weights_has_to_be_better_than_the_head_alone(
    file: str, data: ImageData, tmp_path: Path, decay: float
) -> None:
    head = model(file, unfreeze=False)
    fitted(head, data)
    best, last = best_and_last(tmp_path)
    tuned = model(file, lr=100.0, ema_decay=decay)  # which spoils everything
    fitted(tuned, data, best, last)
    saved = torch.load(best.best_model_path, weights_only=True)
    assert same(
        {name.removeprefix("net."): value for name, value in saved["state_dict"].items() if name[:4] == "net."},
        weights(head.net),
    )
    assert saved["global_step"] == 0 and last.best_model_path != best.best_model_path
    assert saved["cifar_lit"]["score"]["accuracy"] == pytest.approx(float(best.best_model_score))  # type: ignore[arg-type]


@pytest.mark.parametrize("fixed", [False, True])
def test_a_resumed_fine_tuning_goes_on_from_its_weights_and_fits_no_head(
    fixed: bool, file: str, data: ImageData, tmp_path: Path
) -> None:
    whole = model(file, fixed_norms=fixed)
    fitted(whole, data, *best_and_last(tmp_path / "a"))

    def stop(trainer: Any, _: Any) -> None:
        trainer.save_checkpoint(tmp_path / "stopped.ckpt")
        trainer.should_stop = True

    stopped, resumed = model(file, fixed_norms=fixed), model(file, fixed_norms=fixed)
    fitted(stopped, shapes_data(cache_dir=data.settings.cache_dir, flip="random", crop=2), At(4, stop, after=True))
    fitted(
        resumed, shapes_data(cache_dir=data.settings.cache_dir, flip="random", crop=2), resume=tmp_path / "stopped.ckpt"
    )
    assert same(weights(whole), weights(resumed))


def test_fixed_norms_keep_their_statistics_while_their_scales_are_trained(file: str, data: ImageData) -> None:
    for fixed, views in ((True, 0), (False, 1)):
        tuned = model(file, fixed_norms=fixed, head_views=views)
        before = weights(tuned.net)
        fitted(tuned, data, max_epochs=1)
        after = weights(tuned.net)
        statistics = [name for name in before if "running" in name]
        assert statistics and all(torch.equal(before[name], after[name]) == fixed for name in statistics)
        assert not torch.equal(before["1.weight"], after["1.weight"])


def test_rates_rise_in_equal_ratios_from_the_first_layers_to_the_last() -> None:
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(8)))
    groups = parameter_groups(net, "adamw", 1e-2, weight_decay=0.1, input_lr=1e-4)
    rates = {parameter: group["lr"] for group in groups for parameter in group["params"]}
    by_layer = [rates[layer.weight] for layer in net]  # type: ignore[index]
    assert by_layer[0] == pytest.approx(1e-4) and by_layer[-1] == pytest.approx(1e-2)
    ratios = [later / earlier for earlier, later in pairwise(by_layer)]
    assert ratios == pytest.approx([100 ** (1 / 7)] * 7)
    assert all(rates[layer.weight] == rates[layer.bias] for layer in net)  # type: ignore[index]
    few = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))  # of which the last layer is all that is trained
    few[0].requires_grad_(False)
    groups = parameter_groups(few, "adamw", 1e-2, weight_decay=0.1, input_lr=1e-4)
    assert max(group["lr"] for group in groups) == pytest.approx(1e-2)
    assert {group["weight_decay"] for group in groups if group["role"] == "biases"} == {0.0}
    with pytest.raises(UsageError, match=r"model\.optimizer muon does not support model\.input_lr"):
        ImageClassifier("shapenet", [3, 16, 16], 10, optimizer="muon", input_lr=1e-4)


def test_the_first_checkpoint_of_a_run_without_validation_is_the_head(file: str, tmp_path: Path) -> None:
    data = shapes_data(cache_dir=str(tmp_path / "cache"), val_size=0)
    _, last = best_and_last(tmp_path)
    tuned = model(file, unfreeze=False)
    fitted(tuned, data, last, limit_val_batches=0)
    assert isinstance(last, ModelCheckpoint) and (tmp_path / "last.ckpt").is_file() and tuned.score is None


def test_what_is_said_of_the_time_before_the_first_step_changes_nothing(file: str, data: ImageData) -> None:
    def told(trainer: Any, model: Any) -> None:
        before, draws = weights(model), torch.get_rng_state()
        text = finetune.training_plan(model, data, 2)
        assert "last layer on features of the frozen net, about 1 s; then all layers, about 1 s at most" in text
        assert same(weights(model), before) and torch.equal(torch.get_rng_state(), draws) and model.training
        assert all(parameter.grad is None for parameter in model.parameters())

    fitted(model(file, patience=2), data, At(1, told), max_epochs=1)
