"""The page about a run, as text and in a browser."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from browser import Open

from cifar_lit.runs.predictions import table_of
from cifar_lit.runs.report import Content, Findings, Pair, Picture, class_rows, most_confused, report

HOSTILE = "<img src=x onerror=alert(1)>"
CURVES = [{"step": float(step), "train/loss": 2 / step, "lr": 0.1, "val/accuracy": 1 - 1 / step} for step in (10, 20, 30)]


def content(classes: int = 10, images: int = 300, side: int = 32) -> Content:
    generator = torch.Generator().manual_seed(0)
    names = [HOSTILE, "a & b", "_" * 60, *(f"class {number}" for number in range(3, classes))][:classes]
    labels = torch.randint(0, classes, (images,), generator=generator)
    logits = torch.randn(images, classes, generator=generator) + 3 * torch.nn.functional.one_hot(labels, classes)
    found = {"indices": torch.arange(images), "labels": labels, "probabilities": logits.double().softmax(1)}
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
    return Content(f"run {HOSTILE}", names, table_of(found), pixels, metrics, config, CURVES, commands, findings)


def test_what_comes_from_outside_is_escaped_wherever_it_stands() -> None:
    page = report(content())
    assert HOSTILE not in page
    assert page.count("&lt;img src=x onerror=alert(1)&gt;") > 10
    assert "<script" not in page
    assert not re.findall(r"(?:src|href)=\"(?!data:|#)[^\"]*", page)


def test_a_bare_model_has_a_page_too_which_says_what_was_not_looked_at() -> None:
    bare = Content("x", ["a", "b"], content(2).outcomes, content(2).images)
    page = report(bare)
    assert page.count("Not looked for yet") == 2
    assert 'id="curves"' not in page


def test_a_net_that_has_diverged_has_a_page() -> None:
    found = content(3)
    broken = replace(found.outcomes, probability=torch.full_like(found.outcomes.probability, torch.nan))
    assert "the training has diverged" in report(replace(found, outcomes=broken))


def test_precision_recall_and_f1_are_those_of_the_matrix() -> None:
    rows = class_rows(torch.tensor([[8, 2, 0], [4, 6, 0], [0, 0, 0]]), ["a", "b", "none"])
    assert rows[0]["precision"] == pytest.approx(8 / 12)
    assert rows[0]["recall"] == pytest.approx(8 / 10)
    assert rows[0]["f1"] == pytest.approx(2 * (8 / 12) * 0.8 / (8 / 12 + 0.8))
    assert (rows[1]["images"], rows[1]["predicted"], rows[1]["hits"]) == (10, 8, 6)
    assert [rows[2][name] for name in ("precision", "recall", "f1")] == [None] * 3


def test_the_pairs_most_confused_come_first_and_hits_are_none() -> None:
    found = most_confused(torch.tensor([[8, 2, 0], [4, 6, 0], [0, 0, 9]]), ["a", "b", "c"])
    assert found == [("b", "a", 4, 0.4), ("a", "b", 2, 0.2)]


@pytest.mark.parametrize(("classes", "side"), [(10, 32), (100, 224)])
def test_a_page_about_ten_thousand_images_is_small(classes: int, side: int) -> None:
    made = content(classes, images=10_000 if side == 32 else 100, side=side)
    assert len(report(made)) < 2_500_000


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("classes", [2, 10, 100])
def test_it_fits_a_phone_and_asks_for_nothing(open_page: Open, tmp_path: Path, scheme: str, classes: int) -> None:
    (tmp_path / "report.html").write_text(report(content(classes)))
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
def test_every_text_stands_out_from_its_ground(open_page: Open, tmp_path: Path, scheme: str) -> None:
    (tmp_path / "report.html").write_text(report(content()))
    opened = open_page((tmp_path / "report.html").as_uri(), scheme=scheme)
    assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(255, 255, 255)" if scheme == "light" else "rgb(18, 22, 27)"
    )
    assert opened.page.evaluate(CONTRAST) == []


def test_the_keyboard_reaches_the_results_first_and_every_box_that_scrolls(open_page: Open, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(report(content()))
    page = open_page((tmp_path / "report.html").as_uri(), width=400).page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the results"
    assert page.locator(".skip").bounding_box()["x"] >= 0  # type: ignore[index]
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "summary"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert page.locator(".box:not([tabindex='0']), pre:not([tabindex='0'])").count() == 0


def test_headings_go_down_one_level_at_a_time(open_page: Open, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(report(content()))
    page = open_page((tmp_path / "report.html").as_uri()).page
    levels = page.locator("h1, h2, h3, h4").evaluate_all("all => all.map(one => Number(one.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
