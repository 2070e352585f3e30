"""A whitened net in a fit: its first layer from the training images, once; and its test with several views."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import best_and_last, classifier, fitted, same, shapes_data, trainer, weights
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from cifar_lit.data.augment import normalise
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.loaders import Batch
from cifar_lit.errors import UsageError
from cifar_lit.models.whitened import WhitenedNet
from cifar_lit.training import classifier as classifier_module
from cifar_lit.training.checkpoint import read_checkpoint
from cifar_lit.training.classifier import ImageClassifier
from cifar_lit.training.metrics import Evaluation

SMALL: dict[str, Any] = {"net": "whitened", "net_options": {"widths": [8, 12]}, "optimizer": "muon", "momentum": 0.6, "lr": 0.1}


def augmented_data(**settings: Any) -> ImageData:
    return shapes_data(crop=3, flip="random", cutout=4, mean=None, std=None, **settings)


def filters(images: Tensor) -> Tensor:
    """The first layer that a new net computes from images."""
    net: Any = classifier(**SMALL).net
    net.initialise(images)
    weight: Tensor = net.whiten.weight
    return weight


@pytest.mark.parametrize("most", [5000, 30])
def test_the_first_layer_is_computed_once_from_training_images_as_they_are(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert classifier_module.WHITENING_IMAGES == 5000  # as the records take
    monkeypatch.setattr(classifier_module, "WHITENING_IMAGES", most)
    model, data = classifier(**SMALL), augmented_data(resolutions={8: 0.5})
    fitted(model, data)
    fitted(model, shapes_data(count=60, split_seed=5), max_epochs=1)
    net: Any = model.net
    assert bool(net.whitened)
    assert torch.equal(net.whiten.weight, filters(data.plain_images(most)))
    rows = data.train_images.images[data.split[0]]
    plain = normalise(rows, *(torch.tensor(values) for values in data.statistics))
    assert torch.equal(data.plain_images(5000), plain)
    assert plain.shape == (100, 3, 16, 16)


def test_the_average_is_of_whitened_weights(tmp_path: Path) -> None:
    fitted(classifier(**SMALL, ema_decay=0.9), augmented_data(), best_and_last(tmp_path)[1], enable_checkpointing=True)
    state = read_checkpoint(tmp_path / "last.ckpt")["state_dict"]
    torch.testing.assert_close(state["net.whiten.weight"], filters(augmented_data().plain_images(5000)))
    assert bool(state["net.whitened"])


@pytest.mark.parametrize("ema_decay", [0.0, 0.9])
def test_a_resumed_net_keeps_its_first_layer(ema_decay: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    compute = WhitenedNet.initialise

    def counted(net: WhitenedNet, images: Tensor) -> None:
        calls.append(len(images))
        compute(net, images)

    monkeypatch.setattr(WhitenedNet, "initialise", counted)

    def run(epochs: int, resume: bool = False) -> dict[str, Tensor]:
        model, last = classifier(**SMALL, ema_decay=ema_decay), best_and_last(tmp_path)[1]
        path = tmp_path / "last.ckpt" if resume else None
        fitted(model, augmented_data(), last, resume=path, enable_checkpointing=True, max_epochs=epochs)
        return weights(model)

    expected = run(epochs=2)
    run(epochs=1)
    assert calls == [100, 100]
    assert same(run(epochs=2, resume=True), expected)
    assert calls == [100, 100]


def test_a_net_without_images_to_start_from_is_refused_in_one_line() -> None:
    rows = torch.arange(4)
    loader = DataLoader([Batch(torch.zeros(4, 3, 16, 16), rows, rows)], batch_size=None, collate_fn=lambda batch: batch)
    with pytest.raises(UsageError, match=r"^whitened is initialised from training images: fit it with a datamodule$"):
        trainer(max_epochs=1).fit(classifier(**SMALL), loader)
    trainer(max_epochs=1).fit(classifier(), loader)


# ---- test-time views


def views_by_hand(net: nn.Module, images: Tensor, views: str) -> Tensor:
    """From the definition: each look at the images with its weight."""
    padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
    looks = {"mirror": [(images, 0.5)], "full": [(images, 0.25), (padded[..., :-2, :-2], 0.125), (padded[..., 2:, 2:], 0.125)]}[
        views
    ]
    return torch.stack([weight * (net(look) + net(look.flip(3))) for look, weight in looks]).sum(0)


@pytest.fixture(scope="module")
def trained() -> ImageClassifier:
    model = classifier(**SMALL)
    fitted(model, shapes_data(count=600), max_epochs=2)
    return model


@pytest.mark.parametrize("views", ["mirror", "full"])
def test_views_are_scored_beside_the_plain_images(views: str, trained: ImageClassifier) -> None:
    plain, model, looks = classifier(**SMALL), classifier(**SMALL, tta=views), []
    data = shapes_data(count=600, eval_batch_size=50)
    scored = []
    for each in (plain, model):
        each.load_state_dict(trained.state_dict())
        scored.append(trainer().test(each, datamodule=data, verbose=False))
    assert plain.views_score is None
    assert scored[0] == scored[1]
    assert model.score == plain.score
    images = normalise(data.test_images.images, *(torch.tensor(values) for values in data.statistics))
    by_hand = Evaluation(10)
    with torch.no_grad():
        by_hand.update(views_by_hand(model.net.eval(), images, views), data.test_images.labels)
    score, expected = model.views_score, by_hand.compute()
    assert score is not None and model.score is not None
    assert score.accuracy == expected.accuracy and score.confusion == expected.confusion and score.images == 120
    assert score.loss == pytest.approx(expected.loss, abs=2e-6)
    assert score.loss != model.score.loss
    model.net.register_forward_pre_hook(lambda net, images: looks.append(len(images[0])))
    trainer().validate(model, datamodule=data, verbose=False)
    assert looks == [20]  # as they are
