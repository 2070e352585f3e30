"""Choose the layers of an int8 net that stay in float, so that the accuracy falls by at most a given amount.

Greedy, by the sensitivity of each layer: how much the probabilities change if it alone is quantised. Mixed precision is
chosen in this way by HAWQ (Z. Dong et al., ICCV 2019), which estimates the sensitivity from the Hessian.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from torch import Tensor

from cifar_lit.errors import Failure

SENSITIVITY_IMAGES = 64  # every layer needs its own run


def layers_in_float(
    run: Callable[[Sequence[str], int], Tensor], layers: Sequence[str], labels: Tensor, max_drop: float
) -> list[str]:
    """Return the layers, the most sensitive first, to leave in float.

    Args:
        run: returns the probabilities (N, classes) of every n-th calibration image with the given layers in int8.
        layers: names of the layers that may be quantised.
        labels: int64 (N,).
        max_drop: largest fall of the accuracy, as a fraction.

    Raises:
        Failure: the accuracy falls by more even if a single layer is quantised.
    """
    reference = run([], 1)
    lowest = _accuracy(reference, labels) - max_drop - 1e-9  # rounding of the difference
    if _accuracy(run(layers, 1), labels) >= lowest:
        return []
    step = max(1, len(labels) // SENSITIVITY_IMAGES)
    change = {layer: float((run([layer], step) - reference[::step]).abs().mean()) for layer in layers}
    ranked = sorted(layers, key=lambda layer: change[layer], reverse=True)
    count = bisect_left(range(len(ranked)), True, key=lambda count: _accuracy(run(ranked[count:], 1), labels) >= lowest)
    if count == len(ranked):
        text = f"int8 costs more than --max-drop {max_drop:g} of the accuracy even with a single layer in int8"
        raise Failure(f"{text}: allow more, or leave --quantize out")
    return ranked[:count]


def _accuracy(probabilities: Tensor, labels: Tensor) -> float:
    return float(probabilities.argmax(1).eq(labels).double().mean())
