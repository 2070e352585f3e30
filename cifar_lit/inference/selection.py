"""Select unlabelled images to label next."""
from __future__ import annotations
from collections.abc import Callable
from torch import Tensor

def select(probabilities: Tensor, embed: Callable[[Tensor], Tensor], count: int) -> Tensor:
    raise NotImplementedError
