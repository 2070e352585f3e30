"""`serve --collect`: keep pictures that the net is unsure of, to be labelled with `cifar-lit review --pool`."""

from __future__ import annotations

import io
import secrets
import time
from pathlib import Path

import numpy as np
from PIL import Image

from cifar_lit.errors import Failure
from cifar_lit.files import atomic_write
from cifar_lit.text import note

MAX_FILES = 1000  # in the folder
SECONDS = 1.0  # between two pictures
PATTERN = "collected-*.png"


class Collector:
    """A folder of uncertain pictures, as PNG files.

    A picture is kept if its largest probability is below a threshold, or if it is unknown (`serve --reject`). A file
    holds only the pixels that the net sees, under a random name. At most one is written per `SECONDS`. An error ends
    the collection, not the service.

    threshold: probability, 0 … 1. folder: created if it is missing, with access for this user only.
    Raise Failure if the folder cannot be created or read.
    """

    def __init__(self, threshold: float, folder: Path) -> None:
        self.threshold, self.folder = threshold, folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._count = len(list(folder.glob(PATTERN)))
        except OSError as error:
            raise Failure(f"pictures cannot be kept in {folder}: {error.strerror}. Name another folder.") from None
        self._not_before = 0.0  # time of the next write

    def offer(self, probability: float, unknown: bool | None, image: np.ndarray) -> None:
        """Keep an image, uint8 array (H, W, C), if its prediction is uncertain. Raises nothing."""
        is_unsure = probability < self.threshold or unknown
        if not is_unsure or self._count >= MAX_FILES or time.monotonic() < self._not_before:
            return
        self._not_before = time.monotonic() + SECONDS
        path = self.folder / PATTERN.replace("*", secrets.token_hex(8))
        try:
            with atomic_write(path) as partial:
                partial.write_bytes(as_png(image))
            self._count += 1
        except OSError as error:
            self._count = MAX_FILES
            note(f"pictures are no longer kept: {path.parent} cannot be written ({error.strerror})")


def as_png(image: np.ndarray) -> bytes:
    """Return a uint8 image (H, W, C) as a PNG file."""
    if image.shape[2] == 1:
        image = image[:, :, 0]
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()
