"""model.stochastic_depth: residual branches are skipped at random, for each image on its own, in training only."""

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from small_runs import At, classifier, fitted, shapes_data, trainer, weights
from torch import Tensor, nn

from cifar_lit.errors import UsageError
from cifar_lit.training.stochastic_depth import branch_ends

WHITENED: dict[str, Any] = {"net": "whitened", "net_options": {"widths": [4, 6, 8], "residual": True}}


class Branches(Callback):
    """Record the outputs of the branches of the training steps, before and after images skip them.

    Attributes:
        outputs: for each branch, pairs of (B, C, H, W).
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        ends = branch_ends(pl_module.net)
        self.outputs: list[list[tuple[Tensor, Tensor]]] = [[] for _ in ends]
        for end, records in zip(ends, self.outputs, strict=True):
            before: list[Tensor] = []

            def note(*call: Any, before: list[Tensor] = before) -> None:
                before.append(call[2].detach().clone())  # ResNets add to it in place

            def after(*call: Any, before: list[Tensor] = before, records: Any = records) -> None:
                if trainer.training:
                    records.append((before[-1], call[2].detach().clone()))

            end.register_forward_hook(note, prepend=True)
            end.register_forward_hook(after)


WIDE: dict[str, Any] = {"net": "wide_resnet", "net_options": {"depth": 10, "widen": 1}}


@pytest.mark.parametrize(
    ("settings", "count"), [(WHITENED, 3), (WIDE, 3), ({"net": "resnet18"}, 8), ({"net": "resnet50"}, 16)]
)
def test_a_branch_is_skipped_more_often_the_deeper_it_lies(settings: dict[str, Any], count: int) -> None:
    branches = Branches()
    steps = {"max_steps": 2} if count > 3 else {"max_epochs": 12}
    fitted(classifier(**settings, lr=0.001, stochastic_depth=0.8), shapes_data(val_size=0), branches, **steps)
    assert len(branches.outputs) == count
    shares = []
    for number, records in enumerate(branches.outputs, 1):
        raw, output = (torch.cat(values) for values in zip(*records, strict=True))
        skipped = (output == 0).flatten(1).all(1)
        torch.testing.assert_close(output[~skipped], raw[~skipped] / (1 - 0.8 * number / count))
        shares.append(float(skipped.float().mean()))
    if count == 3:
        assert shares == pytest.approx([0.8 / 3, 1.6 / 3, 0.8], abs=0.05)  # 1,440 images


@pytest.mark.parametrize("fails", [False, True])
def test_the_net_is_unchanged_outside_of_a_fit(fails: bool) -> None:
    """Validation uses all branches. After the fit, no hooks are left, also if it failed."""

    def fail(*_: Any) -> None:
        raise RuntimeError("failed on purpose")

    model, data, plain = classifier(**WHITENED, stochastic_depth=0.9), shapes_data(), classifier(**WHITENED)
    try:
        done = fitted(model, data, *([At(3, fail)] if fails else []))
        score = done.callback_metrics["val/loss"]
        plain.load_state_dict(weights(model))
        assert trainer().validate(plain, datamodule=data, verbose=False)[0]["val/loss"] == pytest.approx(float(score))
    except RuntimeError:
        assert fails
    assert not any(module._forward_hooks for module in model.net.modules())


def test_fixed_norms_do_not_keep_branches() -> None:
    branches = Branches()
    fitted(classifier(**WHITENED, stochastic_depth=0.9, fixed_norms=True), shapes_data(), branches, max_epochs=1)
    assert any((output == 0).flatten(1).all(1).any() for _, output in branches.outputs[-1])


def test_a_net_with_hooks_compiles_as_one_graph() -> None:
    model = classifier(**WHITENED, stochastic_depth=0.5)
    done = trainer(max_steps=1)
    compiled: list[Tensor] = []

    def compile_net(*_: Any) -> None:
        net = torch.compile(model.net, backend="eager", fullgraph=True)
        compiled.append(net(torch.zeros(4, 3, 16, 16)))

    done.callbacks.append(At(1, compile_net))  # type: ignore[attr-defined]
    done.fit(model, datamodule=shapes_data())
    assert compiled[0].shape == (4, 10)


def test_nets_without_residual_blocks_and_invalid_rates_are_refused() -> None:
    for settings in ({}, {"net": "whitened"}, {"net": nn.Sequential(nn.Flatten(), nn.Linear(768, 10))}):
        with pytest.raises(UsageError, match="finds no residual blocks in"):
            fitted(classifier(**settings, stochastic_depth=0.1), shapes_data())
    with pytest.raises(UsageError, match="stochastic_depth must be 0 or more and below 1"):
        classifier(stochastic_depth=1.0)
