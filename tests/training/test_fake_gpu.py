"""Steps of every recipe on fake CUDA tensors: torch raises an error where a tensor of the CPU meets one of the GPU.

The backward pass needs a driver and is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torchmetrics.classification import MulticlassConfusionMatrix

from cifar_lit import ImageClassifier, ImageData
from cifar_lit.base.settings import plain_values
from cifar_lit.cli.flags import packaged_recipe
from cifar_lit.data import augment, preprocessing
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.loaders import EvalLoader, TrainLoader
from cifar_lit.models.whitened import WhitenedNet
from cifar_lit.training.metrics import VIEWS, view_logits
from cifar_lit.training.optimizers import build_optimizer
from cifar_lit.training.rows import TrainingRows
from cifar_lit.training.schedules import schedule_from

GPU = torch.device("cuda:0")
COUNT = 12


@pytest.fixture(autouse=True)
def uncached() -> Iterator[None]:
    """Keep fake tensors out of the caches of other tests, and those of other modes out of this one."""
    cached = [value for module in (augment, preprocessing) for value in vars(module).values()]
    clears = [value.cache_clear for value in cached if hasattr(value, "cache_clear")]
    for clear in clears:
        clear()
    yield
    for clear in clears:
        clear()


def shape_of(data: dict[str, Any]) -> tuple[int, int, int]:
    """Return classes, side and channels of the images of a recipe."""
    known = {"num_classes": 10, "image_size": 32, "channels": 3, **data.get("images", {})}
    return known["num_classes"], known["image_size"] or 32, known["channels"] or 3


def image_data(settings: dict[str, Any], images: ImageSet) -> ImageData:
    """Return a datamodule with these images and the augmentation of a recipe."""
    data = ImageData("shapes", augment=settings.get("augment", {}), images={"mean": 0.5, "std": 0.25})
    data.preprocessing.parts = SimpleNamespace(train_images=images)  # type: ignore[assignment]
    return data


RECIPES = ["quickstart", "cpu91", "fast94", "resnet18", "finetune"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_tensors_of_a_step_are_on_the_same_device(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # torchmetrics copies its states, and tensors of a copied mode would not mix with the others.
    monkeypatch.setattr(FakeTensorMode, "__deepcopy__", lambda mode, memo: mode, raising=False)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)  # fake tensors have no memory
    if plain_values(packaged_recipe(recipe))["model"]["net"].startswith("timm/"):
        pytest.importorskip("timm")
    settings: Any = plain_values(packaged_recipe(recipe))
    classes, side, channels = shape_of(settings["data"])
    # torchmetrics selects the counted images, whose number is unknown here.
    monkeypatch.setattr(MulticlassConfusionMatrix, "update", lambda metric, logits, labels: None)
    # Its checks read values, which fake tensors do not have.
    images = ImageSet(torch.zeros(COUNT, side, side, channels, dtype=torch.uint8), torch.arange(COUNT) % 2, ("a", "b"))
    object.__setattr__(images, "classes", tuple(map(str, range(classes))))
    with FakeTensorMode():
        with GPU:  # fake parameters cannot be moved
            model = ImageClassifier(**settings["model"], input_shape=[channels, side, side], num_classes=classes)
        model.rows = TrainingRows(model, GPU)
        model.net.is_prepared = True  # the feature whitening does so
        object.__setattr__(images, "images", torch.zeros(images.images.shape, dtype=torch.uint8, device=GPU))
        object.__setattr__(images, "labels", torch.zeros(COUNT, dtype=torch.int64, device=GPU))
        data = image_data(settings["data"], images)
        fill = torch.zeros(channels, dtype=torch.uint8, device=GPU)
        rows = torch.arange(COUNT)
        loader = TrainLoader(images, rows, COUNT // 2, augment=data.augment, fill=fill, seed=0)
        for size in (None, *settings.get("resolutions", {}).get("sides", {})):
            for batch in loader:
                prepared = data.preprocessing.train_batch(batch, size)
                assert prepared.images.device == GPU
                assert model.training_step(prepared, 0).device == GPU
        with torch.no_grad():
            check_evaluation(model, data, EvalLoader(images, rows, COUNT))
            check_updates(model)


def check_evaluation(model: ImageClassifier, data: ImageData, loader: Any) -> None:
    """Whiten, then score a batch with every kind of test-time augmentation."""
    net: Any = model.eval().net
    for batch in loader:
        images, labels = data.preprocessing.normalise(batch.images), batch.labels
        if isinstance(net, WhitenedNet):
            net.initialise(images)
        logits = model(images)
        model.evaluation.update(logits, labels)
        model._collector.update(logits, labels, batch.indices)
        for views in VIEWS[1:]:
            model.views.update(view_logits(net, images, views, logits), labels)
    states: list[Tensor] = [model.evaluation.loss.sums, model.evaluation.confusion.confmat, *model._collector.logits]
    assert {state.device for state in states} == {GPU}


def check_updates(model: ImageClassifier) -> None:
    """Take steps of Muon. Those of the other optimizers are torch's own fused kernels, which have no fake."""
    h = model.hparams
    if h["optimizer"] != "muon":
        return
    optimizer = build_optimizer(model.net, "muon", h["lr"], h["optimizer_options"])
    schedule = schedule_from(optimizer, h["schedule"], h["schedule_options"] or {}, 100, 10)
    for parameter in model.net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(2):
        optimizer.step()
        schedule.step()
