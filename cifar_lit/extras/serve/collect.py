"""`serve --collect-below`: keep pictures that the net is unsure of, to be labelled with `cifar-lit review --pool`."""

from __future__ import annotations

import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

from PIL import Image

from cifar_lit.errors import Failure
from cifar_lit.files import atomic_write
from cifar_lit.text import note

MAX_FILES = 1000  # in the folder
MAX_BYTES = 200_000_000  # in the folder
SECONDS = 1.0  # between two pictures
PATTERN = "collected-*.png"


class Collector:
    """A folder of uncertain pictures, as PNG files.

    A picture is kept if its largest probability is below a threshold, or if it is unknown (`serve --reject`). A file
    holds only the pixels that the net sees, under a random name. A thread writes it, at most one per `SECONDS`. The
    same pixels are written once until the service ends. An error of a write ends the collection, not the service.

    Args:
        threshold: probability, 0 … 1.
        folder: the folder, created if it is missing, with access for this user only.

    Raises:
        Failure: the folder cannot be created or read.
    """

    def __init__(self, threshold: float, folder: Path) -> None:
        self.threshold, self.folder = threshold, folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            sizes = [path.stat().st_size for path in folder.glob(PATTERN)]
        except OSError as error:
            raise Failure(f"pictures cannot be kept in {folder}: {error.strerror}. Name another folder.") from None
        self._files, self._bytes = len(sizes), sum(sizes)
        self._seen: set[bytes] = set()
        self._not_before = 0.0  # time of the next write
        self._thread = ThreadPoolExecutor(1)

    def offer(self, probability: float, unknown: bool | None, image: Any) -> None:
        """Keep an image, uint8 array (H, W, C), if its prediction is uncertain. Raises nothing and does not wait."""
        is_full = self._files >= MAX_FILES or self._bytes + image.nbytes > MAX_BYTES
        if is_full or time.monotonic() < self._not_before or not (probability < self.threshold or unknown):
            return
        digest = sha256(image).digest()
        if digest not in self._seen:
            self._seen.add(digest)
            self._not_before = time.monotonic() + SECONDS
            self._thread.submit(self._write, image.copy())

    def _write(self, image: Any) -> None:
        path = self.folder / PATTERN.replace("*", secrets.token_hex(8))
        try:
            with atomic_write(path) as partial:
                Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).save(partial, "PNG")
            self._files, self._bytes = self._files + 1, self._bytes + path.stat().st_size
        except OSError as error:
            self._files = MAX_FILES
            note(f"pictures are no longer kept: {path.parent} cannot be written ({error.strerror})")
