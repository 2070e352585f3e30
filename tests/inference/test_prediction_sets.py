"""Prediction sets: their coverage, and the same sets from Python, `classify` and `serve`."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from small_runs import shapes_data
from torch import Tensor

import cifar_lit
from cifar_lit.base.errors import UsageError
from cifar_lit.cli import main
from cifar_lit.cli.classify import classify
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.shapes import shapes
from cifar_lit.inference.calibration import tempered
from cifar_lit.inference.model_file import ModelCard, load_model_file, save_weights
from cifar_lit.inference.rejection import novelty, reject_scores
from cifar_lit.inference.sets import (
    LEVELS,
    held_out_scores,
    measured_coverage,
    prediction_sets,
    set_limit,
)
from cifar_lit.run.card import fitted_card
from cifar_lit.run.results import Tested, calibration_of
from cifar_lit.run.results import test_scores as run_scores
from cifar_lit.training.classifier import ImageClassifier
from cifar_lit.training.score import Score

PICTURES = shapes(False, image_size=16, num_classes=4, count=860)
IMAGES = PICTURES.images[:30].permute(0, 3, 1, 2).contiguous()


def draw(count: int) -> tuple[Tensor, Tensor]:
    """Return probabilities of an overconfident net, float64 (count, 5), and labels. It often misses class 0."""
    generator = torch.Generator().manual_seed(0)
    logits = 1.5 * torch.randn(count, 5, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    logits[:, 0] -= 1
    return (1.5 * logits).softmax(1), labels


def hits(sets: Tensor, labels: Tensor) -> Tensor:
    return sets.gather(1, labels[:, None])[:, 0].double()


def test_sets_reach_their_coverage_over_random_halves_of_the_images() -> None:
    probabilities, labels = draw(2000)
    generator = torch.Generator().manual_seed(1)
    covered: dict[float, list[Tensor]] = {level: [] for level in LEVELS}
    for _ in range(200):
        held_out, new = torch.randperm(len(labels), generator=generator).chunk(2)
        scores = held_out_scores(probabilities[held_out], labels[held_out])
        for level in LEVELS:
            sets = prediction_sets(probabilities[new], set_limit(scores, level))
            covered[level].append(hits(sets, labels[new]).mean())
    for level in LEVELS:
        assert float(torch.stack(covered[level]).mean()) == pytest.approx(level, abs=0.005)


def test_sets_of_a_net_that_is_sure_of_all_images_have_one_class() -> None:
    wrong = 4e-9 * (1 + torch.arange(100, dtype=torch.float64))
    probabilities = torch.stack([1 - wrong, wrong], 1)
    scores = held_out_scores(probabilities, torch.zeros(100, dtype=torch.int64))
    sets = prediction_sets(probabilities.float(), set_limit(scores, 0.8))
    assert sets.tolist() == [[True, False]] * 100


@pytest.mark.parametrize(("rate", "needed"), [(0.5, 1), (0.9, 9), (0.99, 99)])
def test_a_coverage_needs_a_number_of_held_out_images(rate: float, needed: int) -> None:
    enough = [number / needed for number in range(needed)]
    assert set_limit({"lac": [enough, []]}, rate) == pytest.approx(enough[-1])
    few = rf"needs {needed:,} held-out images, and there are {needed - 1:,}: train with a larger data\.val_size"
    with pytest.raises(UsageError, match=few):
        set_limit({"lac": [enough[1:], []]}, rate)


def test_a_test_measures_the_coverage_of_the_levels_that_the_held_out_images_allow() -> None:
    probabilities, labels = draw(2000)
    scores = held_out_scores(probabilities[::2], labels[::2])
    results = measured_coverage(probabilities[1::2], labels[1::2], scores)
    assert [result["coverage"] for result in results] == list(LEVELS)
    sets = prediction_sets(probabilities[1::2], set_limit(scores, 0.9))
    assert results[1]["measured"] == pytest.approx(float(hits(sets, labels[1::2]).mean()), abs=1e-6)
    assert results[1]["set_size"] == pytest.approx(float(sets.sum(1).double().mean()), abs=1e-6)
    assert held_out_scores(probabilities[:19], labels[:19]) is None
    assert held_out_scores(probabilities * torch.nan, labels) is None
    few = held_out_scores(probabilities[:20], labels[:20])
    assert [result["coverage"] for result in measured_coverage(probabilities, labels, few)] == [0.8, 0.9, 0.95]
    assert measured_coverage(probabilities, labels, None) == []


@pytest.mark.parametrize("temperature", [0.4, 1.5])
def test_without_validation_images_the_sets_use_the_temperature_of_the_recipe(temperature: float) -> None:
    probabilities, labels = draw(4000)
    tested = {"labels": labels[:2000], "probabilities": probabilities[:2000], "novelty": labels[:2000].float()}
    model = ImageClassifier("lenet", [3, 16, 16], 5, temperature=temperature)
    fitted = fitted_card(model, shapes_data(num_classes=5, val_size=0), tested)
    new = tempered(probabilities[2000:], fitted.temperature)
    for level in LEVELS:
        sets = prediction_sets(new, set_limit(fitted.coverage, level))
        assert float(hits(sets, labels[2000:]).mean()) == pytest.approx(level, abs=0.02)


def test_a_test_measures_sets_at_the_temperature() -> None:
    probabilities, labels = draw(2000)
    images = ImageSet(torch.zeros(2000, 1, 1, 1, dtype=torch.uint8), labels, tuple("abcde"))
    card = ModelCard("lenet", 1.0, [1, 1, 1], list("abcde"), [0.5], [0.5], temperature=3.0)
    warm = tempered(probabilities, 3.0)
    scores = held_out_scores(warm, labels)
    tested = Tested(Score(0.5, 1.0, 2000, [1.0] * 5, [[1]]), None, {"probabilities": probabilities, "labels": labels})
    test: Any = run_scores(tested, images, card, scores)
    assert test["coverage"] == measured_coverage(warm, labels, scores)
    calibration = calibration_of(warm, labels, card)
    for name in ("error", "perfect"):
        assert test["calibration"][f"tempered_{name}"] == calibration[name]


# ---- the same sets everywhere


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, fitted_run: Path) -> Path:
    """Return a model file with a temperature and the scores of `PICTURES`, except for the first 30."""
    net, folder = load_model_file(fitted_run), tmp_path_factory.mktemp("stored")
    net.card = replace(net.card, temperature=0.5)
    logits = net.logits(PICTURES.images[30:].permute(0, 3, 1, 2))
    scores = held_out_scores(net.probabilities(logits).double(), PICTURES.labels[30:])
    card = replace(net.card, reject=reject_scores(novelty(logits)), coverage=scores)
    save_weights(folder / "net.safetensors", net.net.state_dict(), card)
    return folder / "net.safetensors"


def test_python_and_classify_give_the_same_sets(
    stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    classifier = cifar_lit.load(stored)
    probabilities = classifier.net.probabilities(classifier(IMAGES))
    sets = prediction_sets(probabilities, set_limit(classifier.card.coverage, 0.7))
    assert len(sets.sum(1).unique()) > 1
    predictions = classifier.predict_batch(IMAGES, coverage=0.7)
    expected = [list(prediction.prediction_set or ()) for prediction in predictions]
    for names, is_in, each in zip(expected, sets, probabilities, strict=True):
        order = [classifier.classes[label] for label in each.argsort(descending=True).tolist() if is_in[label]]
        assert names == order
    for number, image in enumerate(IMAGES):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / f"{number:02}.png")
    assert main(["classify", str(stored), str(tmp_path), "--coverage", "0.7", "--jsonl"]) == 0
    assert [json.loads(line)["prediction_set"] for line in capsys.readouterr().out.splitlines()] == expected
    assert main(["classify", str(stored), str(tmp_path), "--coverage", "0.7", "--csv"]) == 0
    rows = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert [row["prediction_set"] for row in rows] == ["|".join(names) for names in expected]
    assert main(["classify", str(stored), str(tmp_path), "--coverage", "0.7"]) == 0
    answer = capsys.readouterr()
    for line, names in zip(answer.out.splitlines()[1:], expected, strict=True):
        assert line.endswith(f"  {', '.join(names)}") or not names
    assert answer.err.startswith(
        "unknown is a hint: it marks about 5 % of images of the known classes, and misses many"
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("RUN a.png --coverage 1", "coverage is a probability above 0 and below 1, not 1: use 0.95"),
        ("RUN a.png --coverage 0.999", "needs 999 held-out images, and there are 830: train with a larger"),
        ("OLD a.png --coverage 0.9", "no prediction sets: train it with 20 or more validation images"),
    ],
)
def test_invalid_command_lines_are_refused(run: Path, stored: Path, words: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        classify(words.replace("RUN", str(stored)).replace("OLD", str(run)).split())
