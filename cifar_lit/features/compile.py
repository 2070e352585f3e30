"""The net compiled by torch on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from cifar_lit.base.errors import check_choice

if TYPE_CHECKING:
    from cifar_lit.training.classifier import ImageClassifier

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@final
class Compile(Callback):
    """Compile the net of the training steps with torch.compile on a CUDA device; elsewhere, this has no effect.

    On two CPU cores, compiling took 89 s, and steps took 1.25 times as long.

    Args:
        mode: mode of torch.compile; reduce-overhead records CUDA graphs.
    """

    may_change = True  # on resume

    def __init__(self, mode: str = "reduce-overhead") -> None:
        check_choice("compile.mode", mode, MODES)
        self._mode = mode

    def on_fit_start(self, trainer: pl.Trainer, pl_module: ImageClassifier) -> None:
        """Compile the net. Each size of images gets a graph of its own, which is faster than one for all sizes."""
        if pl_module.device.type == "cuda":
            pl_module.net.compile(mode=self._mode, dynamic=False)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Evaluate without the compiled net: it would be compiled again, and overwrite the logits of a batch."""
        torch.compiler.set_stance("force_eager")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Train with the compiled net again."""
        torch.compiler.set_stance("default")

    def on_fit_end(self, trainer: pl.Trainer, pl_module: ImageClassifier) -> None:
        """Test without the compiled net."""
        pl_module.net._compiled_call_impl = None
