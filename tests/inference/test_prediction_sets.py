"""Prediction sets: their coverage, and the same sets from Python, `classify`, `serve` and exported files."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from torch import Tensor

import cifar_lit
from cifar_lit.base.errors import UsageError
from cifar_lit.cli import main
from cifar_lit.cli.classify import classify
from cifar_lit.data.shapes import shapes
from cifar_lit.inference.export import Options, export
from cifar_lit.inference.logits import NetImages
from cifar_lit.inference.model_file import load_model_file, save_weights
from cifar_lit.inference.sets import (
    LEVELS,
    Coverage,
    held_out_scores,
    lac_sets,
    measured_coverage,
    prediction_sets,
    set_limits,
)

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


@pytest.mark.parametrize("by_class", [False, True])
def test_sets_reach_their_coverage_over_random_halves_of_the_images(by_class: bool) -> None:
    probabilities, labels = draw(2000)
    generator = torch.Generator().manual_seed(1)
    covered: dict[float, list[Tensor]] = {level: [] for level in LEVELS}
    in_class: dict[float, list[Tensor]] = {level: [] for level in LEVELS}
    for _ in range(200):
        held_out, new = torch.randperm(len(labels), generator=generator).chunk(2)
        scores = held_out_scores(probabilities[held_out], labels[held_out])
        for level in LEVELS:
            limits = set_limits(scores, Coverage(level, by_class))
            own = hits(prediction_sets(probabilities[new], limits), labels[new])
            covered[level].append(own.mean())
            in_class[level].append(torch.stack([own[labels[new] == label].mean() for label in range(5)]))
    for level in LEVELS:
        assert float(torch.stack(covered[level]).mean()) == pytest.approx(level, abs=0.005)
        of_classes = torch.stack(in_class[level]).mean(0)
        if by_class:
            assert of_classes.tolist() == pytest.approx([level] * 5, abs=0.01)
        elif level < 0.95:
            assert float(of_classes[0]) < level - 0.03  # the class that the net misses


def test_sets_of_a_net_that_is_sure_of_all_images_have_one_class() -> None:
    wrong = 4e-9 * (1 + torch.arange(100, dtype=torch.float64))
    probabilities = torch.stack([1 - wrong, wrong], 1)
    scores = held_out_scores(probabilities, torch.zeros(100, dtype=torch.int64))
    sets = prediction_sets(probabilities.float(), set_limits(scores, Coverage(0.8)))
    assert sets.tolist() == [[True, False]] * 100


@pytest.mark.parametrize(("rate", "needed"), [(0.5, 1), (0.9, 9), (0.99, 99)])
def test_a_coverage_needs_a_number_of_held_out_images_and_of_each_class_if_by_class(rate: float, needed: int) -> None:
    enough = [number / needed for number in range(needed)]
    assert set_limits({"lac": [enough, []]}, Coverage(rate)).tolist() == pytest.approx([enough[-1]] * 2)
    few = rf"needs {needed:,} held-out images, and there are {needed - 1:,}: train with a larger data\.val_size"
    with pytest.raises(UsageError, match=few):
        set_limits({"lac": [enough[1:], []]}, Coverage(rate))
    own = set_limits({"lac": [enough, [0.25] * needed]}, Coverage(rate, by_class=True))
    assert own.tolist() == pytest.approx([enough[-1], 0.25])
    with pytest.raises(UsageError, match="held-out images of each class, and there are"):
        set_limits({"lac": [enough, enough[1:]]}, Coverage(rate, by_class=True))


def test_a_test_measures_the_coverage_of_the_levels_that_the_held_out_images_allow() -> None:
    probabilities, labels = draw(2000)
    scores = held_out_scores(probabilities[::2], labels[::2])
    results = measured_coverage(probabilities[1::2], labels[1::2], scores)
    assert [result["coverage"] for result in results] == list(LEVELS)
    sets = lac_sets(probabilities[1::2], scores, 0.9)
    assert sets is not None
    assert results[1]["measured"] == pytest.approx(float(hits(sets, labels[1::2]).mean()), abs=1e-6)
    assert results[1]["set_size"] == pytest.approx(float(sets.sum(1).double().mean()), abs=1e-6)
    assert held_out_scores(probabilities[:19], labels[:19]) is None
    assert held_out_scores(probabilities * torch.nan, labels) is None
    few = held_out_scores(probabilities[:20], labels[:20])
    assert [result["coverage"] for result in measured_coverage(probabilities, labels, few)] == [0.8, 0.9, 0.95]
    assert measured_coverage(probabilities, labels, None) == []


# ---- the same sets everywhere


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, fitted_run: Path) -> Path:
    """Return a model file with a temperature and the scores of `PICTURES`, except for the first 30."""
    net, folder = load_model_file(fitted_run), tmp_path_factory.mktemp("stored")
    net.card = replace(net.card, temperature=0.5)
    probabilities = net.probabilities(net.logits(PICTURES.images[30:].permute(0, 3, 1, 2))).double()
    card = replace(net.card, coverage=held_out_scores(probabilities, PICTURES.labels[30:]))
    save_weights(folder / "net.safetensors", net.net.state_dict(), card)
    return folder / "net.safetensors"


WANTED = [Coverage(0.7), Coverage(0.8, by_class=True)]


def flags(wanted: Coverage) -> list[str]:
    words = ["--coverage", f"{wanted.rate}"]
    return [*words, "--by-class"] if wanted.by_class else words


@pytest.mark.parametrize("wanted", WANTED)
def test_python_and_classify_give_the_same_sets(
    stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], wanted: Coverage
) -> None:
    classifier = cifar_lit.load(stored)
    probabilities = classifier.net.probabilities(classifier(IMAGES))
    sets = prediction_sets(probabilities, set_limits(classifier.card.coverage, wanted))
    assert len(sets.sum(1).unique()) > 1
    expected = []
    for is_in, order in zip(sets.tolist(), probabilities.argsort(1, descending=True).tolist(), strict=True):
        expected.append([classifier.classes[label] for label in order if is_in[label]])
    predictions = classifier.predict_batch(IMAGES, coverage=wanted)
    assert [list(prediction.prediction_set or ()) for prediction in predictions] == expected
    if wanted == Coverage(0.7):
        assert classifier.predict_batch(IMAGES, coverage=0.7) == predictions
    assert [each.prediction_set for each in classifier.predict_batch(IMAGES)] == [None] * 30
    for number, image in enumerate(IMAGES):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / f"{number:02}.png")
    assert main(["classify", str(stored), str(tmp_path), *flags(wanted), "--jsonl"]) == 0
    assert [json.loads(line)["prediction_set"] for line in capsys.readouterr().out.splitlines()] == expected
    assert main(["classify", str(stored), str(tmp_path), *flags(wanted), "--csv"]) == 0
    rows = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert [row["prediction_set"] for row in rows] == ["|".join(names) for names in expected]
    assert main(["classify", str(stored), str(tmp_path), *flags(wanted)]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.rstrip().endswith(f"{{{', '.join(names)}}}") for line, names in zip(lines, expected, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("wanted", WANTED[1:2])
def test_exported_files_have_the_output_set(stored: Path, tmp_path: Path, wanted: Coverage) -> None:
    classifier, sample = cifar_lit.load(stored), NetImages(IMAGES, None, "noise")
    limits = set_limits(classifier.card.coverage, wanted)
    expected = prediction_sets(classifier.net.probabilities(classifier(IMAGES)), limits).tolist()
    for to in ("onnx", "torch-export"):
        export(load_model_file(stored), to, tmp_path / to, sample, Options(coverage=wanted))
    session = onnxruntime.InferenceSession(tmp_path / "onnx", providers=["CPUExecutionProvider"])
    _, sets = session.run(["probabilities", "prediction_set"], {"images": IMAGES.numpy()})
    assert (sets.dtype, sets.tolist()) == (np.bool_, expected)
    about = session.get_modelmeta().custom_metadata_map
    assert json.loads(about["coverage"]) == {"rate": wanted.rate, "by_class": wanted.by_class}
    assert (
        about["output 2"].startswith("prediction_set: bool (batch, 4)")
        and json.loads(about["card"])["coverage"] is None
    )
    _, sets = torch.export.load(tmp_path / "torch-export").module()(IMAGES)
    assert sets.tolist() == expected


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("RUN a.png --coverage 1", "coverage is a probability above 0 and below 1, not 1: use 0.95"),
        ("RUN a.png --by-class", "describes prediction sets: add --coverage 0.95"),
        ("RUN a.png --coverage 0.999", "needs 999 held-out images, and there are 830: train with a larger"),
        ("OLD a.png --coverage 0.9", "no prediction sets: train it with 20 or more validation images"),
    ],
)
def test_invalid_command_lines_are_refused(run: Path, stored: Path, words: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        classify(words.replace("RUN", str(stored)).replace("OLD", str(run)).split())
