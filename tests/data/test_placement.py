"""`Placement` stores images on the device or on the host."""

from __future__ import annotations

import pytest
import torch

from cifar_lit.data.preprocessing import Placement
from cifar_lit.data.sources import SourceSettings
from cifar_lit.data.split_images import SplitImages

CPU = torch.device("cpu")


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
def test_images_are_on_the_device_up_to_half_its_free_memory(kind: str, free_sizes: float | None, place: str) -> None:
    parts = SplitImages("shapes", SourceSettings(image_size=8, count=10))
    images = parts.train_images
    free = None if free_sizes is None else round(free_sizes * images.images.nbytes)
    assert Placement(parts, kind).place_of(images, free) == place


def test_each_part_is_placed_once_and_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = SplitImages("shapes", SourceSettings(image_size=8, count=10))
    placement = Placement(parts)
    first = placement.placed("train", CPU)
    monkeypatch.setattr("cifar_lit.data.preprocessing.free_memory", lambda device: 0)
    assert placement.placed("train", CPU) is first and first[1] == "device"
    images, place = placement.placed("test", CPU)
    assert place == "host" and images is parts.test_images
