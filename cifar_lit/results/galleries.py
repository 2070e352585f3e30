"""Images of a set as small pictures."""

from __future__ import annotations

from base64 import b64encode
from io import BytesIO

import torch
from PIL import Image
from torch import Tensor

LARGEST = 96  # pixels a side of what is shown; CIFAR's are scaled up by whole numbers, so that their pixels are seen


def thumbnail(image: Tensor, largest: int = LARGEST) -> Image.Image:
    """A picture of uint8 (H, W, C) whose longer side is at most `largest`; small ones grow by a whole number."""
    pixels = image.cpu().numpy()
    picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    longest = max(picture.size)
    if longest <= largest:
        times = largest // longest
        return picture.resize((picture.width * times, picture.height * times), Image.Resampling.NEAREST)
    width, height = (max(1, round(side * largest / longest)) for side in picture.size)
    return picture.resize((width, height), Image.Resampling.LANCZOS)


def data_uri(image: Tensor, largest: int = LARGEST) -> str:
    """The address that holds a picture of uint8 (H, W, C) itself.

    Up to half of `largest` pixels a side as they are, in a PNG; larger ones scaled to `largest` as a JPEG.
    """
    file = BytesIO()
    if max(image.shape[:2]) <= largest // 2:
        kind = "png"
        pixels = image.cpu().numpy()
        Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(file, "PNG", optimize=True)
    else:
        kind = "jpeg"
        thumbnail(image, largest).save(file, "JPEG", quality=85)
    return f"data:image/{kind};base64,{b64encode(file.getvalue()).decode()}"


def matrix_uri(matrix: Tensor) -> str:
    """The address of a picture of a confusion matrix int64 (classes, classes): a pixel a cell, darker by its row's fraction."""
    shares = (matrix / matrix.sum(1, keepdim=True).clamp_min(1)).sqrt()  # the root lets rare confusions be seen
    white, full = torch.tensor([255.0, 255.0, 255.0]), torch.tensor([0.0, 60.0, 120.0])
    return data_uri((white + (full - white) * shares[:, :, None]).round().to(torch.uint8), largest=2 * len(matrix))
