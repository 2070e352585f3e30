"""Where the images are kept: the choice."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from cifar_lit.data.datamodule import MAX_MEMORY_SHARE, ImageData, choose_placement
from cifar_lit.errors import UsageError
from cifar_lit.hardware import free_memory


def test_images_go_to_the_device_up_to_half_of_its_free_memory() -> None:
    assert MAX_MEMORY_SHARE == 0.5
    assert choose_placement("auto", 500, 1000) == "device"
    assert choose_placement("auto", 501, 1000) == "host"
    assert choose_placement("auto", 10**15, None) == "device"


@pytest.mark.parametrize("placement", ["device", "host"])
@pytest.mark.parametrize("free", [0, 10**15, None])
def test_a_placement_that_was_asked_for_is_kept(placement: str, free: int | None) -> None:
    assert choose_placement(placement, 10**9, free) == placement


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"placement": "hots"}, r"data\.placement must be one of auto, device, host, not 'hots'\. Did you mean host\?"),
        ({"placement": "gpu"}, r"data\.placement must be one of auto, device, host, not 'gpu'\."),
        ({"workers": 0}, r"data\.workers must be at least 1"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_in_one_line(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line) as refused:
        ImageData("shapes", **settings)
    assert "\n" not in str(refused.value)


def test_the_data_are_placed_once_by_the_size_of_their_images_however_memory_fills_up(monkeypatch: pytest.MonkeyPatch) -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < (free_memory(torch.device("cpu")) or 0) <= total
    data = ImageData("shapes", count=20, image_size=8, val_size=4)
    assert (data.placed("train")[1], data.train_dataloader().workers) == ("device", 0)
    monkeypatch.setattr("cifar_lit.data.datamodule.free_memory", lambda device: 0)
    assert data.placed("train")[1] == "device"
    assert data.placed("test")[1] == "host"
    late = ImageData("shapes", count=20, image_size=8, val_size=4)
    assert (late.placed("train")[1], late.train_dataloader().workers) == ("host", 2)
