"""The loops that ours is compared with do the work that is claimed, and leave ours alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.multiprocessing as mp
from lightning.pytorch.callbacks import Callback
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import ToTensor

from cifar_lit.bench.input import OURS, sides
from cifar_lit.bench.plain import ArrayImages, BareLoop, TutorialLoop
from cifar_lit.bench.training import EpochStopwatch, Stopwatch, Subject, fit
from cifar_lit.bench.tutorial import in_other_process
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.shapes import shapes
from cifar_lit.errors import Failure
from cifar_lit.models.registry import build_net

CPU = torch.device("cpu")
NESTEROV = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "schedule": "one_cycle", "label_smoothing": 0.2}
ADAMW = {"net": "shapenet", "optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1, "schedule": "cosine"}
Make = Callable[..., Subject]


class Weights(Callback):
    """Keeps what the net came to before anything is made of its average."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.state = {name: value.clone() for name, value in pl_module.net.state_dict().items()}  # type: ignore[operator]


def interleaved(subject: Subject) -> tuple[BareLoop, Weights, Stopwatch]:
    """Ours for two epochs of 7 steps, which the bare loop goes along with in rounds of 4 after 2."""
    loops: list[BareLoop] = []

    def start(trainer: pl.Trainer, model: Any) -> Any:
        loops.append(BareLoop(trainer, model, subject.data))
        return loops[0].take

    ours, watch = Weights(), Stopwatch(4, 3, 2, start)
    assert fit(subject, watch, ours, max_epochs=2) == subject.trainer["precision"]
    return loops[0], ours, watch


@pytest.mark.parametrize(
    "settings",
    [
        NESTEROV,
        {**NESTEROV, "precision": "bf16-mixed"},
        {**ADAMW, "schedule_every": "epoch", "ema_decay": 0.5},
        {"batch_size": 10, "momentum": 0.9},  # at a constant rate
        {**ADAMW, "fixed_norms": True},
    ],
    ids=["sgd", "bf16", "adamw", "plain", "fixed norms"],
)
def test_the_bare_loop_comes_to_the_weights_of_the_trainer(settings: dict[str, Any], small_subject: Make) -> None:
    subject = small_subject(**settings)
    loop, ours, watch = interleaved(subject)
    assert [turn.steps for turn in watch.rounds] == [4] * 3
    for key, value in loop.net.state_dict().items():
        torch.testing.assert_close(value, ours.state[key], rtol=0, atol=1e-5)
    assert (loop.average is not None) == ("ema_decay" in settings)
    if loop.average:
        for key, value in loop.average.module.state_dict().items():  # the Trainer leaves its average in the model
            torch.testing.assert_close(value, subject.model.net.state_dict()[key], rtol=0, atol=1e-5)
            assert not torch.equal(value, loop.net.state_dict()[key])


def test_the_bare_loops_optimizer_computes_as_ours_does_on_its_device(small_subject: Make) -> None:
    """On a device that is no CPU Muon multiplies in bfloat16, whatever the net's precision is."""
    subject = small_subject(net="shapenet", optimizer="muon", momentum=0.6)
    model, trainer = subject.model.to("meta"), pl.Trainer(accelerator="cpu", precision="32-true", logger=False)
    model.trainer = trainer
    ours: Any = model.configure_optimizers()
    bare = BareLoop(trainer, model, subject.data)
    products = [[group["products"] for group in each.param_groups] for each in (ours, bare.optimizer)]
    assert products[0] == products[1] == ["bfloat16"] * 3


def test_rounds_start_after_the_warm_up_and_leave_the_training_as_it_is(small_subject: Make) -> None:
    _, accompanied, watch = interleaved(small_subject(momentum=0.9))
    alone, turns = Weights(), list[int]()
    fit(small_subject(momentum=0.9), alone, Stopwatch(4, 3, 2, lambda trainer, model: turns.append), max_epochs=4)
    assert turns == [2, 4, 4, 4]
    assert all(torch.equal(alone.state[name], accompanied.state[name]) for name in alone.state)
    assert [turn.images for turn in watch.rounds] == [64, 52, 52]  # the seventh step of an epoch has 4 images
    assert all(turn.ours > 0 and turn.other > 0 for turn in watch.rounds)


def test_epochs_in_turn_hold_a_validation_each(small_subject: Make) -> None:
    subject, turns = small_subject(), list[int]()
    watch = EpochStopwatch(lambda trainer, model: turns.append)
    fit(subject, watch, max_epochs=2, validates=True)
    assert turns == [7, 7]
    assert [(turn.steps, turn.images) for turn in watch.rounds] == [(7, 100)] * 2
    assert subject.model.score is not None
    assert subject.model.score.images == 20


# ---- the tutorial's loop

IMAGES = shapes(True, image_size=16, num_classes=2, count=32)


def tutorial_loop(net: nn.Module, batch_size: int = 8, **settings: Any) -> TutorialLoop:
    return TutorialLoop(IMAGES, (torch.arange(24), torch.arange(24, 32)), net, batch_size, lr=0.1, **settings)


def test_images_are_as_to_tensor_gives_them() -> None:
    for images in (IMAGES, ImageSet(IMAGES.images[..., :1], IMAGES.labels, IMAGES.classes)):
        pixels, label = ArrayImages(images, [Image.fromarray, ToTensor()])[3]
        assert torch.equal(pixels, images.images[3].permute(2, 0, 1) / 255)
        assert label == images.labels[3]


def test_the_tutorials_loop_makes_the_steps_of_the_tutorial() -> None:
    torch.manual_seed(0)
    net, by_hand = (build_net("lenet", channels=3, image_size=16, num_classes=2) for _ in range(2))
    by_hand.load_state_dict(net.state_dict())
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        pixels = (IMAGES.images[:24].permute(0, 3, 1, 2) / 255 - 0.5) / 0.25
        nn.functional.cross_entropy(by_hand(pixels), IMAGES.labels[:24]).backward()
        optimizer.step()
    steps = tutorial_loop(net, 24, momentum=0.9, mean=[0.5] * 3, std=[0.25] * 3).steps(CPU)
    assert [next(steps) for _ in range(3)] == [24] * 3
    for ours, theirs in zip(net.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_the_tutorials_epoch_trains_on_one_part_and_evaluates_the_other() -> None:
    net, seen = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 2)), {True: 0, False: 0}
    net.register_forward_hook(lambda module, args, logits: seen.update({module.training: seen[module.training] + len(logits)}))
    epochs = tutorial_loop(net).epochs(CPU)
    assert [next(epochs), next(epochs)] == [24, 24]
    assert seen == {True: 48, False: 16}


def test_a_loop_that_fails_in_another_process_is_told_of(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fork = mp.get_context("fork")  # which need not import anything
    monkeypatch.setattr(mp, "get_context", lambda kind: fork)
    loop = tutorial_loop(nn.Sequential(nn.Flatten(), nn.Linear(1, 2)))
    with pytest.raises(Failure, match="the process of the hand-written loop ended with exit code 1"):
        in_other_process(loop, False, CPU)(1)
    assert "mat1 and mat2 shapes cannot be multiplied" in capfd.readouterr().err


# ---- bench input


@pytest.mark.parametrize("drawn", [False, True], ids=["one colour", "patterns"])
def test_every_side_of_input_moves_and_normalises_images_and_keeps_their_labels(drawn: bool) -> None:
    labels = torch.arange(60) % 10
    images = (20 * labels + 10).to(torch.uint8)[:, None, None, None].expand(60, 12, 8, 3).contiguous()  # crops leave them alone
    if drawn:
        images = torch.arange(60 * 12 * 8 * 3).remainder(251).to(torch.uint8).view(60, 12, 8, 3)
    data = ImageData("shapes", batch_size=10, val_size=0, crop=4, flip="random")
    data.parts.train_images = ImageSet(images, labels, tuple("abcdefghij"))
    rows = {tuple(image.flatten().tolist()) for image in images}
    torch.manual_seed(0)  # on whole batches, all images are where they were once in 162 batches
    mean, std = (torch.tensor(values)[:, None, None] for values in data.statistics)
    for name, turn in sides(data, 2, CPU).items():
        stream = turn()
        batches: list[tuple[Tensor, Tensor]] = [next(stream) for _ in range(3)]  # one to start with, two that are counted
        for pixels, labels in batches:
            assert (pixels.dtype, pixels.shape, labels.dtype) == (torch.float32, (10, 3, 12, 8), torch.int64), name
            colours = 255 * (pixels * std + mean)
            back = colours.round().to(torch.uint8).permute(0, 2, 3, 1)
            if drawn:
                assert sum(tuple(image.flatten().tolist()) in rows for image in back) <= 3, name  # one in 162 is to be expected
            else:
                expected = (20.0 * labels + 10)[:, None, None, None].expand_as(colours)
                padded = colours.abs() < 0.01  # with black; ours reflects
                assert not padded.all(1).flatten(1).all(1).any() and not (name == OURS and padded.any()), name
                torch.testing.assert_close(torch.where(padded, expected, colours), expected, atol=0.01, rtol=0)
        assert name == OURS or next(stream, None) is None, name  # so that no worker is busy in the others' turns
