"""Valid and invalid values of data.image_size."""

from __future__ import annotations

import pytest

from cifar_lit.data.source_settings import ImageSize, parse_image_size
from cifar_lit.errors import UsageError

SQUARES = [(96, (96, 96)), ("96", (96, 96))]
RECTANGLES = [("96x128", (96, 128)), ("96×128", (96, 128)), ([1, 2048], (1, 2048)), ((9, 7), (9, 7))]


@pytest.mark.parametrize(("value", "size"), [*SQUARES, *RECTANGLES])
def test_one_number_is_a_square_and_two_are_height_and_width(value: ImageSize, size: tuple[int, int]) -> None:
    assert parse_image_size(value) == size


MALFORMED: list[ImageSize] = ["", "96x", "x96", "96X128", "96x128x3", "9.5", [], [1, 1, 1]]
OUT_OF_RANGE: list[ImageSize] = [0, -3, 2049, "0x10", "10x0", "8x2049", [2049, 8], 10**30]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *(
            (value, "must be a number of pixels for squares, or height x width, such as 96x128, not '")
            for value in MALFORMED
        ),
        *((value, r"must be from 1 to 2,048 pixels a side, not -?\d+×-?\d+$") for value in OUT_OF_RANGE),
        ("9" * 5000, "not '9{40}'$"),
    ],
)
def test_an_invalid_size_is_refused_in_one_short_line(value: ImageSize, text: str) -> None:
    with pytest.raises(UsageError, match=f"--data.image_size .*{text}") as refusal:
        parse_image_size(value)
    assert len(str(refusal.value)) < 160
