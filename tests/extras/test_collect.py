"""`serve --collect DIR`: which pictures are kept, how many, and what they contain."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cifar_lit.errors import Failure
from cifar_lit.extras.serve import collect
from cifar_lit.extras.serve.app import Service
from cifar_lit.extras.serve.collect import Collector
from cifar_lit.extras.serve.images import Limits
from cifar_lit.inference.load import load


def image(seed: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (8, 6, channels), dtype=np.uint8)


def kept(collector: Collector) -> list[Path]:
    return sorted(collector.folder.iterdir())


@pytest.fixture
def collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Collector:
    monkeypatch.setattr(collect, "SECONDS", 0.0)
    return Collector(0.6, tmp_path / "kept")


def test_uncertain_and_unknown_pictures_are_kept_as_plain_pixels(collector: Collector) -> None:
    for probability, unknown, seed in ((0.59, None, 1), (0.6, None, 2), (0.9, True, 3), (0.9, False, 4)):
        collector.offer(probability, unknown, image(seed))
    collector.offer(0.1, None, image(5, channels=1))
    files = kept(collector)
    assert len(files) == 3
    shown = [np.asarray(Image.open(file)) for file in files]
    for expected in (image(1), image(3), image(5, channels=1)[:, :, 0]):
        assert any(np.array_equal(pixels, expected) for pixels in shown)
    assert all(Image.open(file).info == {} and file.stat().st_mode & 0o077 == 0o044 for file in files)
    assert collector.folder.stat().st_mode & 0o777 == 0o700


def test_number_and_rate_are_limited_also_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collector: Collector
) -> None:
    monkeypatch.setattr(collect, "MAX_FILES", 3)
    for seed in range(5):
        collector.offer(0.1, None, image(seed))
        assert len(kept(collector)) == min(seed + 1, 3)
    again = Collector(0.6, collector.folder)
    again.offer(0.1, None, image(9))
    assert len(kept(again)) == 3
    monkeypatch.setattr(collect, "SECONDS", 0.3)
    fresh = Collector(0.6, tmp_path / "rate")
    for seed in range(20):
        fresh.offer(0.1, None, image(seed))
    assert len(kept(fresh)) == 1


def test_a_failed_write_ends_the_collection_but_no_prediction(
    run: Path, collector: Collector, capsys: pytest.CaptureFixture[str]
) -> None:
    collector.threshold = 1.0
    service = Service(load(run), Limits(), collector)
    assert kept(collector) == []  # not the blank image of the first run
    pixels = [np.asarray(image(seed)).repeat(4, 0).repeat(6, 1)[:32, :32].tobytes() for seed in range(3)]
    assert len(service.predict(pixels[:2], 1, False)) == 2 == len(kept(collector))
    for file in kept(collector):
        file.unlink()
    collector.folder.rmdir()
    assert len(service.predict(pixels[2:], 1, False)) == 1
    assert capsys.readouterr().err.count("pictures are no longer kept") == 1
    with pytest.raises(Failure, match="pictures cannot be kept in"):
        Collector(0.5, run / "model.safetensors")
