"""Progressive resizing: the image size by epoch, and invalid sizes."""

from __future__ import annotations

import pytest

from cifar_lit.base.errors import UsageError
from cifar_lit.features.resolutions import Resolutions, check_resolutions


@pytest.mark.parametrize(
    ("resolutions", "epochs", "sides"),
    [
        ({24: 0.4, 28: 0.3}, 10, [24] * 4 + [28] * 3 + [None] * 3),
        ({24: 0.5}, 3, [24] * 2 + [None]),  # 1.5 is rounded to the even number
        ({24: 0.4, 28: 0.3}, 1, [None]),  # 0.4 and 0.7 of one epoch
        ({24: 0.75}, 2, [24, None]),
        ({24: 0.5, 28: 0.5}, 6, [24] * 3 + [28] * 2 + [None]),
        ({28: 0.25, 24: 0.25}, 8, [28] * 2 + [24] * 2 + [None] * 4),
    ],
)
def test_sides_follow_their_shares_in_order_and_the_last_epoch_is_at_full_size(
    resolutions: dict[int, float], epochs: int, sides: list[int | None]
) -> None:
    assert [Resolutions(resolutions).side(epoch, epochs) for epoch in range(epochs)] == sides


@pytest.mark.parametrize(
    ("resolutions", "line"),
    [
        ({40: 0.5}, "resolutions has a side of 40 pixels: use 1 … 30 for these images"),
        ({16: 0.6, 24: 0.5}, r"the shares in resolutions\.sides add up to 1.1: use at most 1"),
    ],
)
def test_invalid_resolutions_are_refused_and_the_limits_are_allowed(resolutions: dict[int, float], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        check_resolutions(resolutions, 30)
    check_resolutions({4: 0.1, 28: 0.2, 27: 0.7}, 28)
