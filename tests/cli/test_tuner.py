"""`--auto-batch` and `--auto-lr`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from contract.command_line import SMALL, assert_refused, run_command
from lightning.pytorch.callbacks import Callback, LambdaCallback
from torch import Tensor

from cifar_lit.cli import tuner
from cifar_lit.cli.tuner import RangeTest, fit_copy, largest_batch, learning_rate, search
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.image_set import ImageSet
from cifar_lit.errors import Failure, UsageError
from cifar_lit.features.balanced import Balanced
from cifar_lit.features.class_weights import ClassWeights
from cifar_lit.features.resolutions import Resolutions
from cifar_lit.training.classifier import ImageClassifier


def make_trainer(*callbacks: Callback, **settings: Any) -> pl.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(accelerator="cpu", callbacks=[*callbacks], enable_model_summary=False, **quiet, **settings)


def make_model(lr: float = 0.05, net: str = "shapenet", **settings: Any) -> ImageClassifier:
    torch.manual_seed(0)
    return ImageClassifier(net, [3, 16, 16], 4, lr=lr, width=0.5, **settings)


def unequal_classes(settings: Any, train: bool) -> ImageSet:
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([0] * 70 + [1] * 20 + [2] * 8 + [3] * 4)
    images = torch.randint(256, (len(labels), 16, 16, 3), dtype=torch.uint8, generator=generator)
    return ImageSet(images, labels, ("a", "b", "c", "d"))


def double(losses: Tensor, logits: Tensor, batch: Any) -> Tensor:
    return 2 * losses


@pytest.mark.parametrize(
    ("model_settings", "data_settings", "callbacks"),
    [
        ({"label_smoothing": 0.3}, {}, []),
        ({}, {}, [ClassWeights()]),
        ({}, {"augment": {"mixup": 1.0}}, []),
        ({}, {}, [Resolutions({8: 0.9})]),
        ({}, {}, [Balanced()]),
        ({}, {}, [LambdaCallback(on_fit_start=lambda trainer, model: model.loss_hooks.append(double))]),
    ],
    ids=["smoothed", "class weights", "mixed", "small images", "balanced", "own hook"],
)
def test_the_loss_of_the_search_is_that_of_the_training(
    model_settings: dict[str, Any], data_settings: dict[str, Any], callbacks: list[Callback]
) -> None:
    """Steps at these rates do not move the net, so all losses of the first epoch are of the same weights."""
    losses = []
    for model, data in ((model_settings, data_settings), ({}, {})):
        further = callbacks if model is model_settings else []
        images = ImageData(unequal_classes, batch_size=32, val_size=6, seed=1, **data)
        still = make_model(1e-30, **model)
        trainer = make_trainer(*further, max_epochs=1, limit_val_batches=0)
        trainer.fit(still, datamodule=images)
        test = RangeTest([1e-3])
        fit_copy(still, images, partial(make_trainer, *further), test, max_epochs=1, limit_val_batches=0)
        assert test.losses == [pytest.approx(float(trainer.callback_metrics["train/loss"]), rel=1e-5)]
        losses += test.losses
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


def test_a_search_changes_neither_the_net_nor_the_random_numbers_of_the_training(data: ImageData) -> None:
    model, configured = make_model(), data.batch_size
    before, state = {name: tensor.clone() for name, tensor in model.state_dict().items()}, torch.get_rng_state()
    largest_batch(model, data, make_trainer)
    learning_rate(model, data, make_trainer)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert (data.batch_size, model.hparams["lr"]) == (configured, 0.05)


def test_auto_lr_scales_all_rates(data: ImageData, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "learning_rate", lambda model, data, make_trainer: 0.5 * model.hparams["lr"])
    model = make_model(0.02, optimizer="muon", optimizer_options={"head_lr": 0.4, "bias_lr": None, "momentum": 0.6})
    assert search({"lr"}, model, data, make_trainer) == 0.5
    assert model.hparams["lr"] == 0.01
    assert model.hparams["optimizer_options"] == {"head_lr": 0.2, "bias_lr": None, "momentum": 0.6}


def test_parameter_groups_keep_the_ratio_of_their_rates(data: ImageData) -> None:
    rates: list[list[float]] = []

    def read(trainer: pl.Trainer, model: ImageClassifier, optimizer: torch.optim.Optimizer) -> None:
        rates.append([group["lr"] for group in optimizer.param_groups])

    schedule: dict[str, Any] = {"schedule": "cosine", "schedule_options": {"warmup_epochs": 1}}
    model = make_model(0.02, optimizer="muon", optimizer_options={"head_lr": 2.0}, **schedule)
    make = partial(make_trainer, LambdaCallback(on_before_zero_grad=read))
    fit_copy(model, data, make, RangeTest([0.5, 1.0, 1.0]), max_epochs=2)
    assert [sorted(set(step)) for step in rates[1:]] == [[0.01, 1.0], [0.02, 2.0]]  # after the first two steps


def test_gradients_of_several_batches_are_one_step_of_the_search(data: ImageData) -> None:
    test = RangeTest([0.1, 0.2])
    fit_copy(make_model(), data, partial(make_trainer, accumulate_grad_batches=2), test, max_epochs=9)
    assert len(test.losses) == 2


def test_on_a_cpu_the_largest_batch_depends_on_free_memory(data: ImageData, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(tuner, "MIN_EPOCH_STEPS", 0.01)
    for free in (2 * 10**7, 4 * 10**7, 10**12):
        monkeypatch.setattr(tuner, "free_memory", lambda device, free=free: free)
        sizes.append(largest_batch(make_model(), data, make_trainer))
    assert 16 <= sizes[0] == sizes[1] // 2
    assert sizes[2] == 4096
    monkeypatch.setattr(tuner, "free_memory", lambda device: 10**4)
    with pytest.raises(Failure, match="16 images do not fit into memory: choose a smaller --net"):
        largest_batch(make_model(), data, make_trainer)


def test_an_epoch_keeps_twenty_steps(data: ImageData, monkeypatch: pytest.MonkeyPatch) -> None:
    for images, size in ((10, 16), (1279, 32), (1280, 64)):
        monkeypatch.setattr(data.parts, "split", (torch.arange(images) % 100, data.split[1]))
        assert largest_batch(make_model(), data, make_trainer) == size


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
def test_auto_lr_lowers_the_loss_from_any_configured_rate(
    data: ImageData, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "MIN_STEPS", 30)
    rates = [learning_rate(make_model(lr, optimizer=optimizer), data, make_trainer) for lr in (0.02, 0.06)]
    assert max(rates) / min(rates) < 4
    test = RangeTest([1.0] * 30)
    fit_copy(make_model(rates[0], optimizer=optimizer), data, make_trainer, test, max_epochs=30)
    assert test.losses[-1] < 0.95 * test.losses[0]


def test_it_is_an_error_if_no_rate_lowers_the_loss(data: ImageData) -> None:
    line = r"no learning rate in 1e\+27 … 1e\+32 lowers the loss clearly in 60 steps: set --lr"
    with pytest.raises(Failure, match=line):
        learning_rate(make_model(1e30, net="lenet"), data, make_trainer)


FALL = [2.0] * 30 + [1.9, 1.7, 1.4, 1.1, 0.9, 0.8, 0.79] + [0.8, 3.0, 2.0, 1.0]


@pytest.mark.parametrize(
    ("losses", "steps"), [(FALL, range(31, 35)), ([2.0, 1.99, 1.98, 1.97, 2.5, 3.0], None), ([], None)]
)
def test_auto_lr_chooses_the_steepest_descent_before_the_lowest_loss(
    losses: list[float], steps: range | None, data: ImageData, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(model: Any, data: Any, make_trainer: Callable[..., pl.Trainer], test: RangeTest, **limits: Any) -> None:
        test.losses = losses

    monkeypatch.setattr(tuner, "fit_copy", run)
    if steps is None:  # a random decrease, or none
        with pytest.raises(Failure, match="no learning rate"):
            learning_rate(make_model(1.0), data, make_trainer)
    else:
        factors = torch.logspace(-3, 2, tuner.MIN_STEPS)[steps]
        assert learning_rate(make_model(1.0), data, make_trainer) in [float(f"{factor:.2g}") for factor in factors]


def test_a_training_without_steps_is_not_searched(data: ImageData) -> None:
    stop = LambdaCallback(on_train_start=lambda trainer, model: setattr(trainer, "should_stop", True))
    with pytest.raises(UsageError, match="--auto-lr need training steps"):
        largest_batch(make_model(), data, partial(make_trainer, stop))


def test_a_search_has_the_callbacks_of_the_training_and_one_device(
    working_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (working_folder / "my_hooks.py").write_text(
        "from lightning.pytorch.callbacks import Callback\n\nclass Fits(Callback):\n"
        "    def on_fit_start(self, trainer, model):\n        open('fits', 'a').write(f'{trainer.max_epochs} ')\n"
    )
    monkeypatch.syspath_prepend(working_folder)
    words = ["fit", *SMALL, "--auto-batch", "--trainer.callbacks", "my_hooks.Fits", "--epochs", "1"]
    assert_refused(run_command(*words, "--devices", "2"), 2, "search with --devices 1")
    assert run_command(*words).code == 0
    assert Path("fits").read_text() == "2 1 "
