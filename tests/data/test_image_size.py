"""Valid and invalid values of data.image_size and of the loading."""

from __future__ import annotations

import pytest

from cifar_lit.base.errors import UsageError
from cifar_lit.data.settings import ImageSize, Loading, parse_image_size


@pytest.mark.parametrize(
    ("value", "size"),
    [(96, (96, 96)), ("96", (96, 96)), ("96x128", (96, 128)), ("96×128", (96, 128)), ([1, 2048], (1, 2048))],
)
def test_one_number_is_a_square_and_two_are_height_and_width(value: ImageSize, size: tuple[int, int]) -> None:
    assert parse_image_size(value) == size


@pytest.mark.parametrize("value", ["", "96x", "96x128x3", "9.5", [1, 1, 1], 0, [8, -4]])
def test_an_invalid_size_is_refused(value: ImageSize) -> None:
    with pytest.raises(UsageError, match=r"--data.image_size must be a number of pixels"):
        parse_image_size(value)


@pytest.mark.parametrize(("name", "value"), [("eval_batch_size", 0), ("workers", -1)])
def test_numbers_that_load_nothing_are_refused(name: str, value: int) -> None:
    with pytest.raises(UsageError, match=f"--data.{name} must be .*, not {value}"):
        Loading(**{name: value})
