"""The page about a run, as text and in a browser."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from browser import Open

from cifar_lit.runs.charts import BINS, expected_calibration_error, reliability
from cifar_lit.runs.label_errors import Findings, Pair
from cifar_lit.runs.predictions import prediction_table
from cifar_lit.runs.report import Content, Picture, charts, class_rows, most_confused, render, summary

HOSTILE = "<img src=x onerror=alert(1)>"
CURVES = [
    {"step": float(step), "train/loss": 2 / step, "lr": 0.1, "val/accuracy": 1 - 1 / step, f"val/{HOSTILE}": 1.0}
    for step in (1, 2, 3)
]


def content(classes: int = 10, images: int = 300, side: int = 32) -> Content:
    generator = torch.Generator().manual_seed(0)
    names = [HOSTILE, "a & b", "_" * 60, *(f"class {number}" for number in range(3, classes))][:classes]
    labels = torch.randint(0, classes, (images,), generator=generator)
    logits = torch.randn(images, classes, generator=generator) + 3 * torch.nn.functional.one_hot(labels, classes)
    predictions = {"indices": torch.arange(images), "labels": labels, "probabilities": logits.double().softmax(1)}
    pixels = torch.randint(0, 256, (images, side, side, 3), dtype=torch.uint8, generator=generator)
    uri = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
    picture = Picture(uri, f"one of {HOSTILE}", (f"label {HOSTILE}", "no. 1"))
    findings = Findings(
        1000, images, [picture] * 24, 30, 12, [Pair(picture, picture, ("cosine 0.99", "difference 3.0"))] * 24, 2, 1
    )
    metrics = {"recipe": HOSTILE, "net": "lenet", "parameters": 1234, "seed": 0, "train_seconds": 61.3, "accelerator": "gpu",
               "devices": 2, "test": {"loss": 0.5, "tta": {"views": "mirror", "accuracy": 0.9, "loss": 0.4}},
               "val": None, "versions": {"torch": "2"}}  # fmt: skip
    commands = [("The page anew", f"cifar-lit report '{HOSTILE}'")]
    config = f"root: {HOSTILE}\n" + "long: " + "word " * 100
    return Content(f"run {HOSTILE}", names, prediction_table(predictions), pixels, metrics, config, CURVES, commands, findings)


@pytest.fixture(scope="module")
def page() -> str:
    return render(content())


@pytest.fixture
def address(page: str, tmp_path: Path) -> str:
    (tmp_path / "report.html").write_text(page)
    return (tmp_path / "report.html").as_uri()


def test_what_comes_from_outside_is_escaped_wherever_it_stands(page: str) -> None:
    assert HOSTILE not in page
    assert page.count("&lt;img src=x onerror=alert(1)&gt;") > 10
    assert "<script" not in page
    assert not re.findall(r"(?:src|href)=\"(?!data:|#)[^\"]*", page)


def test_a_bare_model_that_has_diverged_has_a_page_too_which_says_what_was_not_looked_at() -> None:
    made = content(2)
    broken = replace(made.predictions, probability=torch.full_like(made.predictions.probability, torch.nan))
    page = render(Content("x", ["a", "b"], broken, made.images))
    assert page.count("Not looked for yet") == 2
    assert 'id="curves"' not in page
    assert "the training has diverged" in page


def test_all_that_was_logged_more_than_once_is_charted_and_that_of_one_name_together() -> None:
    rows = [
        {"step": step, "lr-SGD": 0.1, "train/top5": 0.5, "val/top5": 0.6, "val/loss": 1.0, "weight_norm": 3.0}
        for step in (1.0, 2.0)
    ]
    drawn = dict(charts([*rows, {"step": 2.0, "test/top5": 0.7, "test/once": 1.0}]))
    assert list(drawn) == ["loss", "weight norm", "lr-SGD", "top5"]
    assert all(f">{part}</text>" in drawn["top5"] for part in ("train", "val", "test"))
    assert "Top5 over training steps: train ends at 0.5, val ends at 0.6, test ends at 0.7" in drawn["top5"]


def test_all_figures_of_the_test_and_the_validation_are_in_the_summary() -> None:
    views = {"views": "mirror", "accuracy": 0.9, "loss": 0.4}
    test = {"accuracy": 0.5, "loss": 0.25, "images": 10, "per_class": {"a": 1.0}, "top5": 0.99, "tta": views}
    assert summary({"test": test, "val": {"accuracy": 1.0, "f1": 0.75}, "seed": 7000, "parameters": 7000}) == [
        ("parameters", "7,000"), ("seed", "7000"), ("test loss", "0.2500"), ("test top5", "0.9900"),
        ("test accuracy with mirror views", "0.9000"), ("validation accuracy", "1.0000"), ("validation f1", "0.7500"),
    ]  # fmt: skip


def test_precision_recall_and_f1_are_those_of_the_matrix() -> None:
    rows = class_rows(torch.tensor([[8, 2, 0], [4, 6, 0], [0, 0, 0]]), ["a", "b", "none"])
    assert rows[0]["precision"] == pytest.approx(8 / 12)
    assert rows[0]["recall"] == pytest.approx(8 / 10)
    assert rows[0]["f1"] == pytest.approx(2 * (8 / 12) * 0.8 / (8 / 12 + 0.8))
    assert (rows[1]["images"], rows[1]["predicted"], rows[1]["hits"]) == (10, 8, 6)
    assert [rows[2][name] for name in ("precision", "recall", "f1")] == [None] * 3


def test_the_pairs_most_confused_come_first_and_hits_are_none() -> None:
    confused = most_confused(torch.tensor([[8, 2, 0], [4, 6, 0], [0, 0, 9]]), ["a", "b", "c"])
    assert confused == [("b", "a", 4, 0.4), ("a", "b", 2, 0.2)]


# ---- calibration


def test_a_bin_holds_the_probabilities_up_to_its_upper_end() -> None:
    probability = torch.tensor([0.0, 0.2, 0.2000001, 0.5, 1.0], dtype=torch.float64)
    bins = reliability(probability, torch.tensor([True, False, True, True, True]), bins=5)
    assert [part.images for part in bins] == [2, 1, 1, 0, 1]
    assert bins[0].accuracy == 0.5
    assert bins[0].confidence == pytest.approx(0.1)
    assert math.isnan(bins[3].accuracy)


def test_the_error_is_the_mean_distance_over_fifteen_bins_weighted_by_the_images_of_each(page: str) -> None:
    probability = torch.tensor([0.9, 0.9, 0.9, 0.61, 0.69], dtype=torch.float64)  # the last two share one of ten bins
    bins = reliability(probability, torch.tensor([True, True, False, False, True]))
    assert len(bins) == BINS == 15
    assert "over 15 bins of equal width" in page
    by_hand = 3 / 5 * abs(2 / 3 - 0.9) + 1 / 5 * 0.61 + 1 / 5 * 0.31
    assert expected_calibration_error(bins) == pytest.approx(by_hand)


def test_a_net_that_is_right_as_often_as_it_says_has_no_error() -> None:
    probability = torch.rand(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    hits = torch.rand(200_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64) < probability
    assert expected_calibration_error(reliability(probability, hits)) < 0.01
    always = expected_calibration_error(reliability(probability, torch.ones(200_000, dtype=torch.bool)))
    assert always == pytest.approx(0.5, abs=0.01)


# ---- in a browser


def test_a_page_about_a_hundred_classes_of_large_images_is_small() -> None:
    assert len(render(content(100, images=1000, side=224))) < 2_500_000


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("classes", [2, 10, 100])
def test_it_fits_a_phone_and_asks_for_nothing(open_page: Open, tmp_path: Path, scheme: str, classes: int) -> None:
    (tmp_path / "report.html").write_text(render(content(classes)))
    opened = open_page((tmp_path / "report.html").as_uri(), width=400, scheme=scheme)
    assert opened.overflow == 0
    assert opened.errors == []
    assert opened.requests == []
    assert opened.unloaded == []
    assert opened.nameless == []
    opened.page.locator("details").evaluate_all("all => all.forEach(one => one.open = true)")
    assert opened.overflow == 0


CONTRAST = """() => {
  const number = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(x => x / 255).map(x => x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4)
    .reduce((sum, x, place) => sum + x * [.2126, .7152, .0722][place], 0);
  const over = ([r, g, b, a = 1], under) => [r, g, b].map((x, place) => a * x + (1 - a) * under[place]);
  const ground = one => {
    if (!one) return [255, 255, 255];
    const back = number(getComputedStyle(one).backgroundColor);
    return over(back, back[3] === undefined ? back : ground(one.parentElement));
  };
  const low = [];
  for (const one of document.querySelectorAll('body *')) {
    if (![...one.childNodes].some(node => node.nodeType === 3 && node.textContent.trim())) continue;
    const style = getComputedStyle(one), svg = one.namespaceURI.includes('svg');
    if (svg && one.tagName !== 'text') continue;
    const both = [number(svg ? style.fill : style.color), ground(svg ? one.closest('figure') : one)].map(light);
    const contrast = (Math.max(...both) + .05) / (Math.min(...both) + .05);
    if (contrast < 4.5) low.push(`${one.tagName} ${one.textContent.trim().slice(0, 20)} ${contrast.toFixed(2)}`);
  }
  return low;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_its_ground(open_page: Open, address: str, scheme: str) -> None:
    opened = open_page(address, scheme=scheme)
    assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(255, 255, 255)" if scheme == "light" else "rgb(18, 22, 27)"
    )
    assert opened.page.evaluate(CONTRAST) == []


def test_the_keyboard_reaches_the_results_first_and_every_box_that_scrolls(open_page: Open, address: str) -> None:
    page = open_page(address, width=400).page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the results"
    assert page.locator(".skip").bounding_box()["x"] >= 0  # type: ignore[index]
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "summary"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert page.locator(".box:not([tabindex='0']), pre:not([tabindex='0'])").count() == 0


def test_headings_go_down_one_level_at_a_time(open_page: Open, address: str) -> None:
    page = open_page(address).page
    levels = page.locator("h1, h2, h3, h4").evaluate_all("all => all.map(one => Number(one.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
