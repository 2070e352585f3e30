from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cifar_lit
from cifar_lit.inference.load import Prediction
from cifar_lit.inference.novelty import novelty, novelty_threshold
from cifar_lit.runs.model_file import load_model_file, save_weights

IMAGES = torch.randint(0, 256, (30, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))


def logits(count: int) -> torch.Tensor:
    return 3 * torch.randn(count, 4, generator=torch.Generator().manual_seed(count))


def test_novelty_is_the_energy_of_the_logits_and_higher_for_low_logits() -> None:
    given = torch.tensor([[0.0, 0.0], [2.0, 0.0], [200.0, -200.0]])
    expected = torch.tensor([-math.log(2), -math.log(math.exp(2) + 1), -200.0])
    torch.testing.assert_close(novelty(given), expected)
    assert novelty(given - 5).gt(novelty(given)).all()
    assert novelty(torch.zeros(0, 2)).shape == (0,)


def test_five_percent_of_held_out_images_exceed_the_threshold() -> None:
    threshold = novelty_threshold(logits(2000))
    assert threshold is not None
    assert novelty(logits(2000)).gt(threshold).float().mean() == pytest.approx(0.05)
    assert novelty(logits(1000)).gt(threshold).float().mean() == pytest.approx(0.05, abs=0.02)


def test_a_threshold_needs_twenty_held_out_images_with_finite_logits() -> None:
    assert novelty_threshold(logits(20)) is not None
    assert [novelty_threshold(values) for values in (logits(19), logits(0), logits(40) * torch.nan)] == [None] * 3


def predictions(run: Path, tmp_path: Path, threshold: float | None) -> list[Prediction]:
    """Return the predictions for `IMAGES` of a net with another threshold."""
    net = load_model_file(run)
    save_weights(tmp_path / "net.safetensors", net.net.state_dict(), replace(net.card, novelty_threshold=threshold))
    return cifar_lit.load(tmp_path / "net.safetensors").predict_batch(IMAGES)


def test_predictions_are_marked_unlike_above_the_threshold_only(run: Path, tmp_path: Path) -> None:
    scores = novelty(cifar_lit.load(run)(IMAGES))
    threshold = float(scores.median())
    marked = predictions(run, tmp_path, threshold)
    assert [prediction.novelty for prediction in marked] == pytest.approx(scores.tolist())
    assert [prediction.unlike for prediction in marked] == [score > threshold for score in scores.tolist()]
    assert sum(prediction.unlike is True for prediction in marked) == 15
    unmarked = predictions(run, tmp_path, None)
    assert [prediction.unlike for prediction in unmarked] == [None] * 30
    assert [prediction.novelty for prediction in unmarked] == [prediction.novelty for prediction in marked]
