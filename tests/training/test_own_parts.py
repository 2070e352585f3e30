"""Parts that a Python program passes by name, as classes or as objects: nets, optimizers, losses, data sets …"""

import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from small_runs import shapes_data, trainer
from torch import nn
from torch.optim import SGD, lr_scheduler
from torchmetrics.classification import MulticlassF1Score

from cifar_lit import ImageClassifier, ImageData
from cifar_lit.base.trust import UntrustedName
from cifar_lit.data.shapes import shapes
from cifar_lit.training.checkpoint import read_checkpoint
from cifar_lit.training.loss import Loss

MINE = "module_of_a_test"


class Net(nn.Sequential):
    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__(nn.Conv2d(channels, 4, 3, stride=2), nn.Flatten(), nn.LazyLinear(num_classes))
        self(torch.zeros(1, channels, 16, 16))


class Momentum(SGD):
    def __init__(self, params: Any, lr: float, momentum: float = 0.25, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, momentum, weight_decay=weight_decay)


class Doubled(Loss):
    def compute(self, *arguments: Any) -> torch.Tensor:
        return 2 * super().compute(*arguments)


def falling(optimizer: Any, total_steps: int) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_steps)


def images(settings: Any, train: bool) -> Any:
    return shapes(train, count=60, image_size=16)


def plain_sgd(groups: Any) -> SGD:
    return SGD(groups, lr=0.02, weight_decay=0.5)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType(MINE)
    for part in (Net, Momentum, falling, Doubled, images):
        setattr(module, part.__name__, part)
        monkeypatch.setattr(part, "__module__", MINE)
    monkeypatch.setitem(sys.modules, MINE, module)


def fit(dataset: Any = "shapes", **settings: Any) -> tuple[ImageClassifier, pl.Trainer]:
    model = ImageClassifier(**{"net": "lenet", "lr": 0.01, **settings})
    data = shapes_data() if dataset == "shapes" else ImageData(dataset, val_size=10)
    done = trainer(max_epochs=1)
    done.fit(model, data)
    return model, done


def groups(done: pl.Trainer) -> list[tuple[float, float]]:
    return [(group.get("initial_lr", group["lr"]), group["weight_decay"]) for group in done.optimizers[0].param_groups]


@pytest.mark.parametrize("as_name", [True, False])
def test_names_and_classes_are_accepted_alike(as_name: bool, tmp_path: Path) -> None:
    parts: list[Any] = [Net, Momentum, falling, Doubled, images]
    net, optimizer, schedule, loss, dataset = [f"{MINE}.{part.__name__}" for part in parts] if as_name else parts
    metric: Any = "torchmetrics.classification.MulticlassF1Score" if as_name else MulticlassF1Score
    settings = {"net": net, "optimizer": optimizer, "schedule": schedule, "loss": loss}
    further = {"metrics": {"f1": metric}, "optimizer_options": {"weight_decay": 0.1}, "label_smoothing": 0.2}
    model, done = fit(dataset, **settings, **further)
    assert type(model.loss) is Doubled and model.loss.label_smoothing == 0.2
    assert type(model.net) is Net and type(done.optimizers[0]) is Momentum
    assert done.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.0) and groups(done) == [(0.01, 0.1), (0.01, 0.0)]
    assert model.score is not None and model.score.further["f1"] == pytest.approx(
        model.score.values["macro_f1"], abs=1e-5
    )

    done.save_checkpoint(tmp_path / "own.ckpt")
    hparams = read_checkpoint(tmp_path / "own.ckpt")["hyper_parameters"]
    assert [hparams[name] for name in settings] == [f"{MINE}.{part.__name__}" for part in parts[:4]]
    with pytest.raises(UntrustedName, match=rf"{MINE}\.(Momentum|falling|Doubled)"):
        ImageClassifier.load_from_checkpoint(tmp_path / "own.ckpt", net=net)
    loaded = ImageClassifier.load_from_checkpoint(tmp_path / "own.ckpt", **settings)
    trainer(max_epochs=1).fit(loaded, ImageData(dataset))


def test_what_an_optimizer_sets_itself_takes_precedence() -> None:
    assert groups(fit(optimizer=partial(SGD, lr=0.03, weight_decay=0.2))[1]) == [(0.03, 0.2), (0.03, 0.0)]
    assert groups(fit(optimizer=plain_sgd)[1]) == [(0.02, 0.5), (0.02, 0.0)]
    net = Net(3, 10)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.04)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.5)
    _, done = fit(net=net, optimizer=optimizer, schedule=schedule, schedule_options={"every": "epoch"})
    assert done.optimizers[0] is optimizer and optimizer.param_groups[0]["lr"] == 0.02


def test_a_plateau_schedule_follows_the_validation_loss() -> None:
    schedule = partial(lr_scheduler.ReduceLROnPlateau, patience=0, threshold=1e9, threshold_mode="abs", factor=0.1)
    model, done = fit(schedule=schedule)
    assert done.lr_scheduler_configs[0].interval == "epoch"
    assert done.lr_scheduler_configs[0].scheduler.best == pytest.approx(model.score.loss, abs=1e-6)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"optimizer": lambda groups: groups}, r"must return a torch\.optim\.optimizer\.Optimizer, not a list"),
        ({"optimizer": lambda: None}, "takes 0 positional arguments"),
        ({"loss": nn.CrossEntropyLoss}, r"must return a cifar_lit\.training\.loss\.Loss, not a CrossEntropyLoss"),
        ({"loss": nn.CrossEntropyLoss()}, r"CrossEntropyLoss must be a cifar_lit\.training\.loss\.Loss, or a class or"),
        ({"loss": "focal"}, r"model\.loss must be one of cross_entropy, an import path, not 'focal'"),
        ({"schedule": lambda optimizer: 5}, r"must return a torch\.optim\.lr_scheduler\.LRScheduler, not a int"),
        ({"schedule": falling, "schedule_options": {"warmup_epochs": 1}}, rf"{MINE}\.falling takes no warmup_epochs"),
        ({"metrics": {"a": nn.Identity}}, r"must return a torchmetrics\.metric\.Metric, not a Identity"),
        ({"optimizer": "torch.optim.SDG"}, r"torch\.optim has no 'SDG'\. Did you mean SGD\?"),
    ],
)
def test_other_values_are_refused_with_one_line(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(Exception, match=line):
        fit(**settings)
