"""A net as it would be built, without memory for its weights: their shapes can be compared with what a file claims."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from cifar_lit.models.registry import build_net


class _Unfilled(TorchFunctionMode):
    """What layers make their weights with goes to the meta device; small tensors that builders compute with stay real.

    `with torch.device("meta")` would take these too, and torchvision's regnets read widths from one.
    """

    def __torch_function__(
        self, func: Callable, types: Iterable[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        settings = dict(kwargs or {})
        if func in (torch.empty, torch.zeros, torch.ones):
            settings["device"] = "meta"
        return func(*args, **settings)


def build_on_meta_device(name: str, **settings: Any) -> nn.Module:
    """`build_net(name, **settings)` with weights that have shapes and dtypes only; raises what it raises."""
    with _Unfilled():
        return build_net(name, **settings)
