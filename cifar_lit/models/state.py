"""State dicts of nets from tensors that a file holds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from torch import Tensor, nn


def with_versions(net: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Attach the `_metadata` of `net` (the versions of its modules) to tensors loaded from a file."""
    state = OrderedDict(tensors)
    state._metadata = net.state_dict()._metadata  # type: ignore[attr-defined]
    return state
