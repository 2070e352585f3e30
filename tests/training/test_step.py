"""An optimizer step against torch's own calls: clipping, accumulation, precision, hooks."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback
from small_runs import Rows, classifier, fitted, same, shapes_data, weights
from torch import Tensor, nn
from torch.nn import functional as F

from cifar_lit.data.datamodule import ImageData
from cifar_lit.models.registry import build_net

EPOCHS, BATCHES = 2, 7


def by_hand(
    data: ImageData,
    clip: Callable[[list[nn.Parameter]], Any],
    accumulate: int,
    name: str = "tudui",
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[dict[str, Tensor], int]:
    """A loop with torch's own optimizer; a group of batches that the epoch's end cuts short is a step as well."""
    torch.manual_seed(0)
    net = build_net(name, channels=3, image_size=16, num_classes=10)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    loader = data.train_dataloader()
    steps = 0
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        batches = list(loader)
        for number, batch in enumerate(batches, 1):
            images = data.on_after_batch_transfer(batch, 0).images.contiguous()
            with context():
                loss = F.cross_entropy(net(images), batch.labels)
            (loss / accumulate).backward()
            if number % accumulate == 0 or number == len(batches):
                clip(list(net.parameters()))
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
    return net.state_dict(), steps


CLIPS: dict[str, tuple[dict[str, Any], Callable[[list[nn.Parameter]], Any]]] = {
    "not at all": ({}, lambda weights: None),
    "by norm": ({"gradient_clip_val": 0.05}, lambda weights: nn.utils.clip_grad_norm_(weights, 0.05)),
    "by value": (
        {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"},
        lambda weights: nn.utils.clip_grad_value_(weights, 0.002),
    ),
}


@pytest.mark.parametrize("accumulate", [1, 2, 3, 7, 10])
@pytest.mark.parametrize("clip", CLIPS)
def test_clipped_and_accumulated_steps_are_those_of_a_loop_written_by_hand(clip: str, accumulate: int) -> None:
    settings, clipping = CLIPS[clip]
    expected, steps = by_hand(shapes_data(), clipping, accumulate)
    model = classifier(net="tudui", momentum=0.9)
    done = fitted(model, shapes_data(), accumulate_grad_batches=accumulate, max_epochs=EPOCHS, **settings)
    assert done.global_step == steps == EPOCHS * -(-BATCHES // accumulate)
    for name, tensor in expected.items():
        torch.testing.assert_close(model.net.state_dict()[name], tensor, rtol=0, atol=2e-6, msg=name)


def test_clipping_changes_what_is_trained_here() -> None:
    plain, *clipped = (by_hand(shapes_data(), clipping, 1)[0] for _, clipping in CLIPS.values())
    for other in clipped:
        assert max(float((plain[name] - tensor).abs().max()) for name, tensor in other.items()) > 1e-3


def mixed() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize(("clip", "accumulate"), [("not at all", 1), ("by norm", 1), ("by norm", 3), ("by value", 2)])
def test_steps_in_mixed_precision_clip_and_accumulate_the_same_way(clip: str, accumulate: int) -> None:
    """Of a perceptron: in bfloat16 many pixels of a pooling window are equal, and which one learns is up to the kernel."""
    settings, clipping = CLIPS[clip]
    expected, _ = by_hand(shapes_data(), clipping, accumulate, "signs_mlp", mixed)
    exact, _ = by_hand(shapes_data(), clipping, accumulate, "signs_mlp")
    model = classifier(net="signs_mlp", momentum=0.9)
    options: dict[str, Any] = {"precision": "bf16-mixed", "max_epochs": EPOCHS, "accumulate_grad_batches": accumulate}
    fitted(model, shapes_data(), **options, **settings)
    for name, tensor in expected.items():
        torch.testing.assert_close(model.net.state_dict()[name], tensor, rtol=0, atol=2e-6, msg=name)
    assert max(float((exact[name] - tensor).abs().max()) for name, tensor in expected.items()) > 1e-5


class Hooks(Callback):
    """Notes the hooks of a step in the order of their calls, and the norm of the gradients that they were shown."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.norms: list[float] = []

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self.calls.append(f"before backward {loss.ndim}")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.calls.append("after backward")

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        assert optimizer is trainer.optimizers[0]
        self.calls.append("before step")
        self.norms.append(sum(float(weight.grad.square().sum()) for weight in pl_module.parameters() if weight.grad is not None))

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.calls.append("before zero grad")


def test_a_users_hooks_of_a_step_are_called_once_a_step_in_their_order() -> None:
    hooks = Hooks()
    fitted(classifier(), shapes_data(), hooks, max_epochs=2)
    assert hooks.calls == 2 * BATCHES * ["before zero grad", "before backward 0", "after backward", "before step"]
    assert min(hooks.norms) > 0


def test_where_batches_are_accumulated_the_hooks_of_the_update_are_called_once_a_group() -> None:
    hooks = Hooks()
    fitted(classifier(), shapes_data(), hooks, max_epochs=1, accumulate_grad_batches=4)
    backward = ["before backward 0", "after backward"]
    assert hooks.calls == [call for batches in (4, 3) for call in ("before zero grad", *(batches * backward), "before step")]


@pytest.mark.parametrize("hook", ["on_before_optimizer_step", "on_before_zero_grad", "on_after_backward"])
def test_functions_given_as_hooks_are_called_as_well(hook: str) -> None:
    calls: list[int] = []
    fitted(classifier(), shapes_data(), LambdaCallback(**{hook: lambda *arguments: calls.append(1)}), max_epochs=1)  # type: ignore[arg-type]
    assert len(calls) == BATCHES


def test_listening_to_a_step_does_not_change_it() -> None:
    alone, heard = classifier(momentum=0.9), classifier(momentum=0.9)
    fitted(alone, shapes_data())
    fitted(heard, shapes_data(), Hooks())
    assert same(weights(alone), weights(heard))


def test_what_a_callback_does_to_gradients_takes_effect() -> None:
    class Zero(Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
            for weight in pl_module.parameters():
                weight.grad = None if weight.grad is None else torch.zeros_like(weight)

    model = classifier()
    before = weights(model)
    fitted(model, shapes_data(), Zero())
    assert same(weights(model), before)


def test_the_logged_rate_is_that_of_the_step_to_come() -> None:
    rows = Rows()
    fitted(classifier(schedule="triangular", lr=0.07), shapes_data(), logger=rows, log_every_n_steps=1, max_epochs=1)
    expected = {step: 0.07 * (1 - step / BATCHES) for step in range(1, BATCHES + 1)}
    assert rows.of("lr") == pytest.approx(expected, abs=1e-9)
