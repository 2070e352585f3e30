from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cifar_lit
from cifar_lit.base.errors import UsageError
from cifar_lit.cli.classify import classify
from cifar_lit.inference.model_file import load_model_file, save_weights
from cifar_lit.inference.rejection import STORED_RATES, novelty, reject_scores, threshold

IMAGES = torch.randint(0, 256, (30, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))


def scores(count: int) -> torch.Tensor:
    """Return scores whose tail has the assumed form: the rate is the square of the distance to the end."""
    return 3 - 2 * torch.rand(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64).sqrt()


def test_novelty_is_the_energy_of_the_logits_and_higher_for_low_logits() -> None:
    given = torch.tensor([[0.0, 0.0], [2.0, 0.0], [200.0, -200.0]])
    expected = torch.tensor([-math.log(2), -math.log(math.exp(2) + 1), -200.0])
    torch.testing.assert_close(novelty(given), expected)
    assert novelty(given - 5).gt(novelty(given)).all()
    assert novelty(torch.zeros(0, 2)).shape == (0,)


def test_two_stored_scores_give_the_threshold_of_any_rate() -> None:
    held_out, others = scores(20_000), scores(30_000)
    stored = reject_scores(held_out)
    assert stored is not None and len(stored) == 2
    for rate, score in zip(STORED_RATES, stored, strict=True):
        assert threshold(stored, rate) == pytest.approx(score)
        assert held_out.gt(score).double().mean() == pytest.approx(rate, abs=1e-3)
    for rate in (0.005, 0.01, 0.05, 0.1, 0.3, 0.5):
        assert others.gt(threshold(stored, rate)).double().mean() == pytest.approx(rate, rel=0.15)


def test_scores_for_reject_need_twenty_held_out_images_with_finite_logits() -> None:
    assert reject_scores(scores(20)) is not None
    assert [reject_scores(values) for values in (scores(19), scores(0), scores(40) * torch.nan)] == [None] * 3


@pytest.fixture
def stored(run: Path, tmp_path: Path) -> Path:
    """Return a model file with scores of the images above."""
    net = load_model_file(run)
    card = replace(net.card, reject=reject_scores(novelty(cifar_lit.load(run)(IMAGES))), temperature=0.5)
    save_weights(tmp_path / "net.safetensors", net.net.state_dict(), card)
    return tmp_path / "net.safetensors"


def test_predictions_are_marked_as_unknown_at_the_chosen_rate(run: Path, stored: Path) -> None:
    classifier = cifar_lit.load(stored)
    energies = novelty(classifier(IMAGES)).tolist()
    assert classifier.card.reject is not None
    for rate in (None, 0.01, 0.05, 0.2, 0.5):
        highest = threshold(classifier.card.reject, rate or 0.05)
        marked = classifier.predict_batch(IMAGES, reject=rate)
        assert [prediction.unknown for prediction in marked] == [energy > highest for energy in energies]
    assert sum(prediction.unknown is True for prediction in classifier.predict_batch(IMAGES, reject=0.2)) == 6
    without = cifar_lit.load(run).predict_batch(IMAGES, reject=0.2)
    assert {prediction.unknown for prediction in without} == {None}
    assert [prediction.novelty for prediction in without] == pytest.approx(energies)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("RUN picture.png --reject 0.9", "false-alarm rate above 0 and up to 0.5, not 0.9: use 0.05"),
        ("OLD picture.png --reject 0.05", "cannot reject images: train it with at least 20 validation"),
    ],
)
def test_invalid_command_lines_are_refused(run: Path, stored: Path, words: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        classify(words.replace("RUN", str(stored)).replace("OLD", str(run)).split())
