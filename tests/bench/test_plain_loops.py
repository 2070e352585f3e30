"""The loops that ours is compared with do the work that is claimed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torchvision.transforms import Compose, Normalize, ToTensor

from cifar_lit.bench.plain import BareLoop, PilImages, TutorialLoop
from cifar_lit.bench.step import Interleave
from cifar_lit.bench.training import Lap, Stopwatch, Subject, fit
from cifar_lit.bench.tutorial import InterleaveEpochs, in_other_process
from cifar_lit.data.shapes import shapes
from cifar_lit.errors import Failure
from cifar_lit.models.registry import build_net

CPU = torch.device("cpu")
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum and decay": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "schedule by step": {"schedule": "one_cycle", "label_smoothing": 0.2},
    "schedule by epoch": {"schedule": "cosine", "schedule_every": "epoch"},
    "batch norm and AdamW": {"net": "shapenet", "optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1, "schedule": "triangular"},
}
STEPS, ROUNDS = 3, 4  # 15 steps with the warm-up: two epochs of 7 steps, and one


class Weights(Callback):
    """Keeps what the net came to."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.steps = trainer.global_step
        self.state = {name: value.clone() for name, value in pl_module.net.state_dict().items()}  # type: ignore[operator]


Make = Callable[..., Subject]


def interleaved(subject: Subject, max_epochs: int = 4) -> tuple[BareLoop, dict[str, Tensor]]:
    """The bare loop and the weights of ours, after as many steps of both from the same weights."""
    loops: list[BareLoop] = []

    def start(trainer: pl.Trainer, model: Any) -> Any:
        loops.append(BareLoop(trainer, model, subject.data))
        return loops[0].take

    ours, turns = Weights(), Interleave(start, STEPS, ROUNDS)
    fit(subject, turns, ours, max_epochs=max_epochs)
    assert [turn.steps for turn in turns.rounds] == [STEPS] * ROUNDS
    assert ours.steps == STEPS * (ROUNDS + 1)
    return loops[0], ours.state


@pytest.mark.parametrize("name", SETTINGS)
def test_the_bare_loop_comes_to_the_weights_of_the_trainer(name: str, small_subject: Make) -> None:
    loop, ours = interleaved(small_subject(SETTINGS[name], {"crop": 2, "flip": "random"}))
    assert loop.loss > 0
    for key, value in loop.net.state_dict().items():
        torch.testing.assert_close(value, ours[key], rtol=0, atol=1e-5)


def test_the_bare_loop_computes_in_the_trainers_precision(small_subject: Make) -> None:
    settings = SETTINGS["momentum and decay"]
    loop, ours = interleaved(small_subject(settings, precision="bf16-mixed"))
    full, _ = interleaved(small_subject(settings))
    distances = [
        sum(float((value - other[key]).abs().sum()) for key, value in loop.net.state_dict().items())
        for other in (ours, full.net.state_dict())
    ]
    assert distances[0] < 0.01 * distances[1]


def test_the_bare_loop_averages_weights_where_the_recipe_does(small_subject: Make) -> None:
    subject = small_subject({"ema_decay": 0.5, "lr": 0.2}, {"batch_size": 20})  # 15 steps are three epochs
    loop, _ = interleaved(subject, max_epochs=3)
    assert loop.average is not None
    for key, value in loop.average.module.state_dict().items():  # the Trainer leaves its average in the model
        torch.testing.assert_close(value, subject.model.net.state_dict()[key], rtol=0, atol=1e-5)
        assert not torch.equal(value, loop.net.state_dict()[key])


def test_the_trainer_goes_on_undisturbed_by_the_loop_beside_it(small_subject: Make) -> None:
    def weights(*callbacks: Callback) -> dict[str, Tensor]:
        subject = small_subject({"momentum": 0.9})
        fit(subject, *callbacks, max_epochs=1)
        return subject.model.net.state_dict()

    beside = small_subject()
    alone = weights()
    accompanied = weights(Interleave(lambda trainer, model: BareLoop(trainer, model, beside.data).take, 2, 2000))
    assert all(torch.equal(alone[name], accompanied[name]) for name in alone)


def test_laps_start_after_the_warm_up_and_the_training_waits_between(small_subject: Make) -> None:
    ended: list[Lap | None] = []
    watch = Stopwatch(warmup=2, steps=3, count=2, between=ended.append)
    subject = small_subject()
    fit(subject, watch, max_epochs=4)
    assert [(lap.steps, lap.images) for lap in watch.laps] == [(3, 48), (3, 36)]  # the epoch of 7 steps ends with one of 4
    assert ended == [None, *watch.laps]


def test_pil_images_are_as_to_tensor_gives_them() -> None:
    images = shapes(True, image_size=16, num_classes=2, count=32)
    pixels, label = PilImages(images)[3]
    assert torch.equal(pixels, images.images[3].permute(2, 0, 1) / 255)
    assert label == images.labels[3]
    chosen = PilImages(images, torch.tensor([7, 3]), Compose([ToTensor(), Normalize([0.5] * 3, [0.25] * 3)]))
    assert len(chosen) == 2
    torch.testing.assert_close(chosen[1][0], (pixels - 0.5) / 0.25)


def tutorial_loop(net: nn.Module, **settings: Any) -> TutorialLoop:
    images = shapes(True, image_size=16, num_classes=2, count=32)
    split = torch.arange(24), torch.arange(24, 32)
    return TutorialLoop(images, split, net, batch_size=8, lr=0.1, shuffle=False, **settings)


def test_the_tutorials_loop_makes_the_steps_of_the_tutorial() -> None:
    torch.manual_seed(0)
    net = build_net("lenet", channels=3, image_size=16, num_classes=2)
    by_hand = build_net("lenet", channels=3, image_size=16, num_classes=2)
    by_hand.load_state_dict(net.state_dict())
    images = shapes(True, image_size=16, num_classes=2, count=32)
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1, momentum=0.9)
    for start in (0, 8, 16, 0):  # after the third step a new epoch
        rows = torch.arange(start, start + 8)
        pixels = (images.images[rows].permute(0, 3, 1, 2) / 255 - 0.5) / 0.25
        optimizer.zero_grad()
        nn.functional.cross_entropy(by_hand(pixels), images.labels[rows]).backward()
        optimizer.step()
    steps = tutorial_loop(net, momentum=0.9, mean=[0.5] * 3, std=[0.25] * 3).steps(CPU)
    assert [next(steps) for _ in range(4)] == [8] * 4
    for ours, theirs in zip(net.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


class Counting(nn.Module):
    """Counts the images that it is shown, in training and out of it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3 * 16 * 16, 2)
        self.seen = {True: 0, False: 0}

    def forward(self, pixels: Tensor) -> Tensor:
        self.seen[self.training] += len(pixels)
        logits: Tensor = self.head(pixels.flatten(1))
        return logits


def test_the_tutorials_epoch_trains_on_one_part_and_evaluates_the_other() -> None:
    net = Counting()
    epochs = tutorial_loop(net).epochs(CPU)
    assert [next(epochs), next(epochs)] == [24, 24]
    assert net.seen == {True: 48, False: 16}


def test_epochs_in_turn_hold_a_validation_each(small_subject: Make) -> None:
    subject = small_subject()
    steps: list[int] = []
    turns = InterleaveEpochs(lambda trainer, model: lambda count: steps.append(trainer.global_step) or 100)
    fit(subject, turns, max_epochs=3, validates=True)
    assert steps == [7, 14, 21]
    assert [(turn.steps, turn.images) for turn in turns.rounds] == [(7, 100)] * 3
    assert subject.model.score is not None
    assert subject.model.score.images == 20


def test_a_loop_in_another_process_makes_the_steps_of_the_same_loop_here() -> None:
    take = in_other_process(tutorial_loop(nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 2))), "epochs", CPU)
    assert [take(1), take(2)] == [24, 48]


def test_a_loop_that_fails_in_another_process_is_told_of(capfd: pytest.CaptureFixture[str]) -> None:
    loop = tutorial_loop(nn.Sequential(nn.Flatten(), nn.Linear(1, 2)))
    with pytest.raises(Failure, match="the process of the hand-written loop ended with exit code 1"):
        in_other_process(loop, "epochs", CPU)(1)
    assert "mat1 and mat2 shapes cannot be multiplied" in capfd.readouterr().err
