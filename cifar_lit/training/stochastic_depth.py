"""Stochastic depth (`model.stochastic_depth`; G. Huang et al., Deep Networks with Stochastic Depth, ECCV 2016)."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.ops import stochastic_depth

from cifar_lit.errors import UsageError
from cifar_lit.models.whitened import Group
from cifar_lit.models.wide_resnet import WideBlock


class StochasticDepth(Callback):
    """Skip the residual branches of `model.net` at random during a fit, for each image on its own.

    The draws are resumed like those of dropout. `rate` is the probability for the last branch; it rises linearly with
    depth. Raises UsageError for a net without known residual blocks.
    """

    def __init__(self, model: Any, rate: float) -> None:
        self._ends, self._rate, self._handles = branch_ends(model.net), rate, list[Any]()
        if not self._ends:
            known = "those of torchvision's ResNets, wide_resnet, and whitened with net_options '{residual: true}'"
            remedy = f"only {known}. For timm's nets, set net_options '{{drop_path_rate: {rate:g}}}'"
            raise UsageError(f"model.stochastic_depth finds no residual blocks in {model.hparams['net']}, {remedy}")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Add hooks. They look at the mode of the whole net, because fixed norms are not in training mode."""
        net = pl_module.net
        for number, end in enumerate(self._ends, 1):
            rate = self._rate * number / len(self._ends)
            hook = lambda _, inputs, output, rate=rate: stochastic_depth(output, rate, "row", net.training)  # noqa: E731
            self._handles.append(end.register_forward_hook(hook))

    def on_fit_end(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException | None = None) -> None:
        """Remove the hooks, also after a failed fit."""
        while self._handles:
            self._handles.pop().remove()

    on_exception = on_fit_end


def branch_ends(net: nn.Module) -> list[nn.Module]:
    """Return the last layer of each residual branch, in order."""
    ends: list[nn.Module] = []
    for block in net.modules():
        if isinstance(block, BasicBlock | Bottleneck):
            ends.append(block.bn3 if isinstance(block, Bottleneck) else block.bn2)
        elif isinstance(block, Group) and block.residual:
            ends.append(block.norms[-1])
        elif isinstance(block, WideBlock):
            ends.append(block.branch)
    return ends
