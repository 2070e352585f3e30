"""The search for layers of an int8 net that stay in float."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from cifar_lit.errors import Failure
from cifar_lit.inference.int8_search import layers_in_float

LABELS = torch.arange(100) % 2
COSTS = {"a": 0, "b": 30, "c": 2, "d": 10}  # wrong predictions of 100 if the layer is in int8


def run(int8: Sequence[str], step: int) -> torch.Tensor:
    """Return probabilities (100, 2) of a net whose layers each spoil other images."""
    probabilities = torch.nn.functional.one_hot(LABELS, 2).double()
    assert step == 1
    wrong = sum(COSTS[layer] for layer in int8)
    probabilities[:wrong] = probabilities[:wrong].flip(1)
    return probabilities[::step]


@pytest.mark.parametrize(
    ("max_drop", "expected"),
    [(0.5, []), (0.42, []), (0.41, ["b"]), (0.12, ["b"]), (0.11, ["b", "d"]), (0.02, ["b", "d"]), (0, ["b", "d", "c"])],
)
def test_the_most_sensitive_layers_stay_in_float_until_the_accuracy_holds(max_drop: float, expected: list[str]) -> None:
    assert layers_in_float(run, list(COSTS), LABELS, max_drop) == expected


def test_an_unreachable_accuracy_is_a_failure() -> None:
    with pytest.raises(Failure, match=r"more than --max-drop 0\.01 .* even with a single layer in int8: allow more"):
        layers_in_float(run, ["b", "d"], LABELS, 0.01)
