"""Stochastic depth (`model.stochastic_depth`; G. Huang et al., Deep Networks with Stochastic Depth, ECCV 2016)."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.ops import stochastic_depth

from cifar_lit.errors import UsageError
from cifar_lit.models.whitened import Group


class StochasticDepth(Callback):
    """Skip the residual branches of a net at random during a fit, for each image on its own.

    The hooks use the generator of the device, as dropout does, and leave net, weights and evaluation as they are.
    Raises UsageError for a net without known residual blocks.

    Args:
        model: an ImageClassifier.
        rate: probability of skipping the last branch. It rises linearly with depth.
    """

    def __init__(self, model: Any, rate: float) -> None:
        self._ends, self._rate = branch_ends(model.net), rate
        self._handles: list[RemovableHandle] = []
        if not self._ends:
            known = "those of torchvision's ResNets, and of whitened with net_options '{residual: true}'"
            remedy = f"only {known}. For timm's nets, set net_options '{{drop_path_rate: {rate:g}}}'"
            raise UsageError(f"model.stochastic_depth finds no residual blocks in {model.hparams['net']}, {remedy}")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Add the hooks."""
        for number, end in enumerate(self._ends, 1):
            rate = self._rate * number / len(self._ends)
            self._handles.append(end.register_forward_hook(partial(_skip, net=pl_module.net, rate=rate)))

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
    return ends


def _skip(end: nn.Module, inputs: Any, output: Tensor, net: nn.Module, rate: float) -> Tensor:
    """Return the output of a branch, 0 for skipped images: a forward hook. Fixed norms are not in training mode."""
    return stochastic_depth(output, rate, "row", net.training)
