"""Figures for TensorBoard and pictures of pages."""

from __future__ import annotations

import sys
from base64 import b64decode
from io import BytesIO

import pytest
import torch
from PIL import Image

from cifar_lit.runs.charts import data_uri, matrix_uri, thumbnail
from cifar_lit.runs.tensorboard_images import class_accuracies, confusion_matrix, gallery

HOSTILE = ["$a_{", "<script>alert(1)</script>", "two\nlines", "x" * 80, "日本", "%s {}"]


def opened(uri: str) -> Image.Image:
    kind, _, code = uri.partition(";base64,")
    assert kind in ("data:image/png", "data:image/jpeg")
    return Image.open(BytesIO(b64decode(code)))


@pytest.mark.parametrize("draw", [confusion_matrix, class_accuracies])
@pytest.mark.parametrize("names", [HOSTILE, [f"class {number}" for number in range(30)]])
@pytest.mark.filterwarnings("error:Glyph")
def test_figures_have_something_on_them_for_any_number_and_kind_of_classes(draw: object, names: list[str]) -> None:
    matrix = torch.randint(0, 5, (len(names), len(names))) + 40 * torch.eye(len(names), dtype=torch.int64)
    matrix[1] = 0  # a class without images
    picture = draw(matrix, names)  # type: ignore[operator]
    assert picture.dtype == torch.uint8
    assert picture.shape[0] == 3
    assert max(picture.shape) < 3000
    assert len(picture[0].unique()) > 10
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == []  # it would keep them all


@pytest.mark.parametrize("shape", [(28, 28, 1), (200, 120, 3)])
def test_a_gallery_shows_its_images_whatever_their_shape(shape: tuple[int, int, int]) -> None:
    images = torch.full((7, *shape), 77, dtype=torch.uint8)
    picture = gallery(images, [(name, "0.5 x") for name in [*HOSTILE, "last"]])
    assert ((picture == 77).all(0).sum() / (7 * 96 * 96)).item() > 0.5


def test_an_empty_gallery_says_so() -> None:
    assert gallery(torch.zeros(0, 8, 8, 3, dtype=torch.uint8), []).float().std() > 0


@pytest.mark.parametrize(("shape", "size"), [((32, 32, 3), (32, 32)), ((28, 28, 1), (28, 28)), ((200, 100, 3), (48, 96))])
def test_small_images_keep_their_pixels_and_large_ones_are_scaled_down(
    shape: tuple[int, int, int], size: tuple[int, int]
) -> None:
    image = torch.randint(0, 256, shape, dtype=torch.uint8)
    picture = opened(data_uri(image))
    assert picture.size == size
    if shape[0] <= 48:
        assert picture.tobytes() == image.numpy().tobytes()


def test_a_thumbnail_grows_by_whole_numbers() -> None:
    assert thumbnail(torch.zeros(32, 20, 3, dtype=torch.uint8)).size == (60, 96)
    assert thumbnail(torch.zeros(1000, 1, 3, dtype=torch.uint8)).size == (1, 96)


def test_a_matrix_is_darker_where_more_of_a_row_lies() -> None:
    picture = opened(matrix_uri(torch.tensor([[90, 10], [0, 100]]))).convert("L")
    values = [picture.getpixel((x, y)) for y in range(2) for x in range(2)]
    assert values[3] < values[0] < values[1] < values[2] == 255
