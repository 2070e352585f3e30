"""`serve --collect-below`: which pictures are kept, how many, and what they contain."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cifar_lit.errors import Failure
from cifar_lit.extras.serve import collect
from cifar_lit.extras.serve.collect import Collector
from cifar_lit.extras.serve.workers import NetRequest, NetRunner
from cifar_lit.inference.load import load


def image(seed: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (8, 6, channels), dtype=np.uint8)


def kept(collector: Collector) -> list[Path]:
    collector._thread.submit(int).result()  # the writes before it have ended
    return sorted(collector.folder.iterdir())


@pytest.fixture
def collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Collector:
    monkeypatch.setattr(collect, "SECONDS", 0.0)
    return Collector(0.6, tmp_path / "kept")


def test_uncertain_and_unlike_pictures_are_kept_once_as_plain_pixels(collector: Collector) -> None:
    for probability, unlike, seed in ((0.59, None, 1), (0.6, None, 2), (0.9, True, 3), (0.9, False, 4), (0.1, None, 1)):
        collector.offer(probability, unlike, image(seed))
    collector.offer(0.1, None, image(5, channels=1))
    files = kept(collector)
    assert len(files) == 3
    shown = [np.asarray(Image.open(file)) for file in files]
    for expected in (image(1), image(3), image(5, channels=1)[:, :, 0]):
        assert any(np.array_equal(pixels, expected) for pixels in shown)
    assert all(Image.open(file).info == {} and file.stat().st_mode & 0o077 == 0o044 for file in files)
    assert collector.folder.stat().st_mode & 0o777 == 0o700


def test_number_bytes_and_rate_are_limited_also_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collector: Collector
) -> None:
    monkeypatch.setattr(collect, "MAX_FILES", 3)
    for seed in range(5):
        collector.offer(0.1, None, image(seed))
        assert len(kept(collector)) == min(seed + 1, 3)
    again = Collector(0.6, collector.folder)
    again.offer(0.1, None, image(9))
    assert len(kept(again)) == 3
    monkeypatch.setattr(collect, "MAX_FILES", 100)
    monkeypatch.setattr(collect, "MAX_BYTES", sum(file.stat().st_size for file in kept(again)) + image(9).nbytes - 1)
    again.offer(0.1, None, image(9))
    assert len(kept(again)) == 3
    monkeypatch.setattr(collect, "MAX_BYTES", 10**6)
    monkeypatch.setattr(collect, "SECONDS", 0.3)
    fresh = Collector(0.6, tmp_path / "rate")
    for seed in range(20):
        fresh.offer(0.1, None, image(seed))
    assert len(kept(fresh)) == 1
    time.sleep(0.3)
    fresh.offer(0.1, None, image(30))
    assert len(kept(fresh)) == 2


def test_a_failed_write_ends_the_collection_but_no_prediction(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(collect, "SECONDS", 0.0)
    collector = Collector(1.0, tmp_path / "kept")
    runner = NetRunner(load(run), collector)
    assert kept(collector) == []  # not the blank image of the first run
    pixels = [np.asarray(image(seed)).repeat(4, 0).repeat(6, 1)[:32, :32].tobytes() for seed in range(3)]
    answers = runner._predict([NetRequest(pixels[:2], 1, False)])
    assert len(answers[0]) == 2 and len(kept(collector)) == 2
    for file in kept(collector):
        file.unlink()
    collector.folder.rmdir()
    assert len(runner._predict([NetRequest(pixels[2:], 1, False)])[0]) == 1
    collector._thread.submit(int).result()
    assert capsys.readouterr().err.count("pictures are no longer kept") == 1
    with pytest.raises(Failure, match="pictures cannot be kept in"):
        Collector(0.5, run / "model.safetensors")
