"""A fit initialises the first layer of a whitened net from the training images, once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback
from small_runs import BATCHES, best_and_last, classifier, fitted, same, shapes_data, trainer, weights
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from cifar_lit.base.errors import UsageError
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.preprocessing import normalise
from cifar_lit.data.settings import Split
from cifar_lit.features import whitening
from cifar_lit.features.resolutions import Resolutions
from cifar_lit.features.weight_average import WeightAverage
from cifar_lit.features.whitening import Whitening
from cifar_lit.models.whitened import WhitenedNet
from cifar_lit.training.checkpoint import read_checkpoint

CPU = torch.device("cpu")

SMALL: dict[str, Any] = {
    **{"net": "whitened", "net_options": {"widths": [8, 12]}, "lr": 0.1, "schedule": "triangular"},
    **{"optimizer": "muon", "optimizer_options": {"momentum": 0.6}},
}


def augmented_data(**settings: Any) -> ImageData:
    return shapes_data(augment={"crop": 3, "flip": "random", "cutout": 4}, mean=None, std=None, **settings)


def normalised(data: ImageData, rows: Tensor) -> Tensor:
    return normalise(rows, *(torch.tensor(values) for values in data.statistics))


def test_the_first_layer_is_computed_once_from_plain_images(monkeypatch: pytest.MonkeyPatch) -> None:
    assert whitening.WHITENING_IMAGES == 5000  # the number in airbench
    monkeypatch.setattr(whitening, "WHITENING_IMAGES", 30)
    model, data = classifier(**SMALL), augmented_data()
    fitted(model, data, Resolutions({8: 0.5}), Whitening())
    fitted(model, shapes_data(count=60, split=Split(seed=5)), Whitening(), max_epochs=1)
    net, expected = model.net, classifier(**SMALL).net
    assert isinstance(net, WhitenedNet) and isinstance(expected, WhitenedNet) and bool(net.whitened)
    expected.initialise(data.plain_images(30))
    assert torch.equal(net.whiten.weight, expected.whiten.weight)
    assert torch.equal(data.plain_images(5000), normalised(data, data.train_images.images[data.split[0]]))


@pytest.mark.parametrize("averages", [False, True])
def test_the_average_starts_from_whitened_weights_and_resume_keeps_the_first_layer(
    averages: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, compute = list[int](), WhitenedNet.initialise

    def counted(net: WhitenedNet, images: Tensor) -> None:
        calls.append(len(images))
        compute(net, images)

    def run(epochs: int, resume: Path | None = None) -> dict[str, Tensor]:
        model, average = classifier(**{**SMALL, "schedule": "constant"}), [WeightAverage(0.9)] if averages else []
        callbacks = [*average, Whitening(), best_and_last(tmp_path)[1]]
        fitted(model, augmented_data(), *callbacks, resume=resume, max_epochs=epochs)
        return weights(model)

    monkeypatch.setattr(WhitenedNet, "initialise", counted)
    expected = run(epochs=2)
    run(epochs=1)
    assert calls == [100, 100]
    state = read_checkpoint(tmp_path / "last.ckpt")["state_dict"]  # the average, if any
    torch.testing.assert_close(state["net.whiten.weight"], expected["net.whiten.weight"])
    assert bool(state["net.whitened"])
    assert same(run(epochs=2, resume=tmp_path / "last.ckpt"), expected)
    assert calls == [100, 100]


@pytest.mark.parametrize(
    ("epochs", "settings", "trainer_settings", "first"),
    [
        (1.5, {}, {}, 11),  # seven steps per epoch; the rate of the 12th is 0
        (1.5, {"schedule_options": {"every": "epoch"}}, {}, 2 * BATCHES),
        (1, {}, {"gradient_clip_val": 0.5}, None),  # the norm includes this gradient
    ],
)
def test_a_whitening_bias_at_rate_0_gets_no_gradient_and_the_weights_are_bit_equal(
    epochs: float | None, settings: Any, trainer_settings: Any, first: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> tuple[dict[str, Tensor], list[bool]]:
        model, has_gradient = classifier(**{**SMALL, **settings}), list[bool]()
        note = LambdaCallback(
            on_after_backward=lambda _, model: has_gradient.append(model.net.whiten.bias.grad is not None)
        )
        fitted(model, augmented_data(), Whitening(epochs), note, max_epochs=3, **trainer_settings)
        assert not model.net.bias_is_final  # after the fit, all gradients are computed
        return weights(model), has_gradient

    final, has_gradient = run()
    assert has_gradient == [first is None or step < first for step in range(3 * BATCHES)]
    monkeypatch.setattr(Whitening, "on_train_batch_start", Callback.on_train_batch_start)  # no gradient is skipped
    assert same(final, run()[0])


def test_a_bias_that_cannot_end_early_and_a_layer_without_whitening_are_refused() -> None:
    without_bias = {"net_options": {**SMALL["net_options"], "whiten_bias": False}}
    for settings in ({"optimizer": "sgd"}, without_bias, {"schedule": torch.optim.lr_scheduler.ConstantLR}):
        with pytest.raises(UsageError, match="bias_epochs needs a net with a whitening bias"):
            trained = trainer(Whitening(1), LambdaCallback(setup=lambda *_: pytest.fail("has a folder")))
            trained.fit(classifier(**{**SMALL, **settings}), shapes_data())
    with pytest.raises(UsageError, match="add the feature whitening"):
        fitted(classifier(**SMALL), shapes_data())


def test_without_a_datamodule_the_first_layer_comes_from_the_first_batches() -> None:
    images, labels = torch.randn(24, 3, 16, 16), torch.arange(24) % 10
    model, expected = classifier(**{**SMALL, "lr": 1e-9}), classifier(**SMALL)
    trainer(Whitening(), max_epochs=1).fit(model, DataLoader(TensorDataset(images, labels), 6))
    expected.net.initialise(images)
    torch.testing.assert_close(model.net.whiten.weight, expected.net.whiten.weight)
