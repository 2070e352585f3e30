"""Figures for TensorBoard and images for HTML pages."""

from __future__ import annotations

from base64 import b64decode
from io import BytesIO

import pytest
import torch
from PIL import Image

from cifar_lit.runs.figures import as_pixels, confusion_matrix, data_uri

HOSTILE = ["$a_{", "<script>alert(1)</script>", "two\nlines", "x" * 80, "日本", "%s {}"]


@pytest.mark.parametrize("names", [HOSTILE, [f"class {number}" for number in range(30)]])
@pytest.mark.filterwarnings("error:Glyph")
def test_a_confusion_matrix_is_drawn_for_any_number_and_kind_of_classes(names: list[str]) -> None:
    matrix = torch.randint(0, 5, (len(names), len(names))) + 40 * torch.eye(len(names), dtype=torch.int64)
    matrix[1] = 0  # a class without images
    picture = as_pixels(confusion_matrix(matrix, names))
    assert (picture.dtype, picture.shape[0], max(picture.shape) < 3000) == (torch.uint8, 3, True)
    assert len(picture[0].unique()) > 10


def test_mistakes_stand_out_in_the_matrix_of_a_net_that_makes_few() -> None:
    picture = as_pixels(confusion_matrix(torch.tensor([[900, 1], [2, 900]]), ["a", "b"])).float().mean(0)
    height, width = picture.shape
    values = [picture[int(y * height), int(x * width)].item() for y in (0.25, 0.6) for x in (0.35, 0.7)]
    assert values[2] < values[1] < 225 and abs(values[0] - values[3]) < 1


@pytest.mark.parametrize(("shape", "size"), [((32, 32, 3), (32, 32)), ((200, 100, 1), (48, 96))])
def test_small_images_keep_their_pixels_and_large_images_are_scaled_down(
    shape: tuple[int, int, int], size: tuple[int, int]
) -> None:
    image = torch.randint(0, 256, shape, dtype=torch.uint8)
    kind, _, code = data_uri(image).partition(";base64,")
    picture = Image.open(BytesIO(b64decode(code)))
    assert (kind, picture.size) == ("data:image/png" if shape[0] <= 48 else "data:image/jpeg", size)
    assert shape[0] > 48 or picture.tobytes() == image.numpy().tobytes()
