"""`Placement`: keep images in the memory of the training device or on the host."""

from __future__ import annotations

from dataclasses import replace

import torch

from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.split_images import SplitImages
from cifar_lit.errors import check_choice
from cifar_lit.hardware import free_memory

PLACEMENTS = ("auto", "device", "host")
MAX_MEMORY_SHARE = 0.5  # the net, activations and other programs need the rest


class Placement:
    """Place the images of a data set, once for each device.

    Args:
        parts: the images.
        kind: device (the memory of the training device), host (their file or host memory), or auto. auto means device
            if the images fit into half of its free memory.
    """

    def __init__(self, parts: SplitImages, kind: str = "auto") -> None:
        check_choice("data.placement", kind, PLACEMENTS)
        self.parts = parts
        self.kind = kind
        self._placed: dict[tuple[str, torch.device], tuple[ImageSet, str]] = {}

    def placed(self, part: str, device: torch.device) -> tuple[ImageSet, str]:
        """Return the `train` or `test` images, and their placement, `device` or `host`."""
        key = (part, device)
        if key not in self._placed:
            images: ImageSet = getattr(self.parts, f"{part}_images")
            placement = self.place_of(images, free_memory(device))
            if placement == "device":
                images.prefetch()
                pixels, labels = (tensor.to(device) for tensor in (images.images, images.labels))
                images = replace(images, images=pixels, labels=labels, mapped=False)
            self._placed[key] = images, placement
        return self._placed[key]

    def place_of(self, images: ImageSet, free: int | None) -> str:
        """Return `device` or `host`. free: free bytes of the device's memory, None if unknown."""
        if self.kind != "auto":
            return self.kind
        return "device" if free is None or images.images.nbytes <= MAX_MEMORY_SHARE * free else "host"
