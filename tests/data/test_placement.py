"""Images are placed on the device or on the host."""

from __future__ import annotations

import pytest
import torch

from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.preprocessing import place_images

FREE_MEMORY = "cifar_lit.data.preprocessing.free_memory"


@pytest.mark.parametrize(
    ("kind", "free_sizes", "place"),
    [
        ("auto", 2.0, "device"),
        ("auto", 1.9, "host"),
        ("auto", None, "device"),  # free memory is unknown
        ("device", 0.0, "device"),
        ("host", 9.0, "host"),
    ],
)
def test_images_are_on_the_device_up_to_half_its_free_memory(
    kind: str, free_sizes: float | None, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = ImageData("shapes", images={"image_size": 8, "count": 10}).train_images
    free = None if free_sizes is None else round(free_sizes * images.images.nbytes)
    monkeypatch.setattr(FREE_MEMORY, lambda device: free)
    assert place_images(images, kind, torch.device("cpu")).place == place
