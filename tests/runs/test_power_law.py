"""Power laws of learning curves: known laws are found, and intervals grow with the noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cifar_lit.runs.learning_curve import draw, fit_law, read_points

SIZES = [1000, 2000, 3000, 4000]


def law(images: float, floor: float, scale: float, exponent: float) -> float:
    return 1 - floor - scale * (images / 4000) ** -exponent


@pytest.mark.parametrize(("floor", "scale", "exponent"), [(0.05, 0.15, 0.6), (0.1, 0.1, 0.9), (0.2, 0.1, 0.3)])
def test_the_law_behind_the_points_is_within_the_intervals(floor: float, scale: float, exponent: float) -> None:
    accuracies = [law(size, floor, scale, exponent) for size in SIZES]
    expected = law(8000, floor, scale, exponent)
    fit = fit_law(SIZES, accuracies, 10**6, [8000])
    ranges = [fit["a"], fit["c"], fit["gain"], fit["accuracy"][0]]
    for truth, (median, low, high) in zip([floor, exponent, expected - accuracies[-1], expected], ranges, strict=True):
        assert low <= median <= high and low <= truth <= high
    assert fit["accuracy"][0][0] > accuracies[-1]


def test_intervals_cover_what_is_measured_with_twice_the_images() -> None:
    draws = np.random.default_rng(0)
    hits = 0
    for _ in range(40):
        floor, scale, exponent = draws.uniform(0, 0.2), draws.uniform(0.05, 0.2), draws.uniform(0.2, 1.2)
        seeds = draws.normal(1, 0.03, 5)  # noise of the training: 3 % of the error
        truths = [
            (1 - law(size, floor, scale, exponent)) * seed for size, seed in zip([*SIZES, 8000], seeds, strict=True)
        ]
        accuracies = 1 - draws.binomial(1000, truths) / 1000
        _, low, high = fit_law(SIZES, accuracies[:4].tolist(), 1000, [8000])["accuracy"][0]
        hits += low <= accuracies[4] <= high
    assert hits >= 36  # expected: 38 of 40


def test_intervals_are_narrower_with_more_test_images_and_gains_vanish_on_a_plateau() -> None:
    widths = []
    for tested in (100, 1000, 100_000):
        _, low, high = fit_law(SIZES, [0.6, 0.7, 0.75, 0.78], tested, [8000])["accuracy"][0]
        widths.append(high - low)
    assert widths == sorted(widths, reverse=True) and widths[2] < widths[0] / 2
    assert fit_law(SIZES, [0.9] * 4, 100_000)["gain"][2] < 0.01
    for extreme in (0.0, 1.0):
        assert all(np.isfinite(fit_law(SIZES, [extreme] * 4, 10, [8000])["accuracy"][0]))


def metrics(train: int, accuracy: float, **data: str) -> dict[str, Any]:
    test = {"accuracy": accuracy, "interval": [accuracy - 0.02, accuracy + 0.02], "images": 500, "fingerprint": "f"}
    record = {"train": train, "images": "i", "labels": "l", "split": str(train), **data}
    return {"test": {**test, "per_class": {"cat": accuracy, "dog": None}}, "data": record}


def test_points_are_of_the_same_images_and_ascending() -> None:
    last = metrics(400, 0.9)
    wrong = [{}, {"test": None, "data": {"train": 5}}, metrics(50, 0.5, images="x"), metrics(60, 0.5, labels="x"),
             metrics(0, 0.5), {**metrics(70, 0.5), "data": [1]}]  # fmt: skip
    damaged = metrics(80, 0.5)
    damaged["test"]["per_class"] = {"cat": "x"}
    points = read_points([metrics(200, 0.8), *wrong, damaged, metrics(100, 0.7), last])
    assert [point["images"] for point in points] == [100, 200, 400]
    assert points[0]["per_class"] == {"cat": 0.7} and points[2]["accuracy"] == 0.9


def test_the_curve_is_drawn_as_png_and_svg(tmp_path: Path) -> None:
    points = read_points([metrics(100 * number, 0.6 + 0.07 * number) for number in (1, 2, 3, 4)])
    assert draw(points).startswith("<svg") and "measured" in draw(points)
    draw(points, tmp_path / "curve.png")
    with Image.open(tmp_path / "curve.png") as image:
        assert image.format == "PNG" and image.size == (880, 580)
