"""The HTML report of a run, as text and in a browser."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from browser import Open

from cifar_lit.data.image_set import ImageSet
from cifar_lit.run.label_results import label_results
from cifar_lit.run.predictions import PredictionTable, prediction_table
from cifar_lit.runs import report
from cifar_lit.runs.figures import Picture, curves
from cifar_lit.runs.label_errors import Duplicates, Findings, Pair, Suspects
from cifar_lit.runs.report import render

NO_FINDINGS = Findings(None, Suspects(0, [], 0, 0), None)
HOSTILE = "<img src=x onerror=alert(1)>"
URI = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"  # 1 × 1 pixel
METRICS = {
    "recipe": HOSTILE, "net": "lenet", "parameters": 7000, "seed": 7000, "train_seconds": 61.3, "accelerator": "gpu",
    "processor": "a CPU", "commit": "abc", "command": f"train {HOSTILE}", "date": "2026-01-02T03:04:05+00:00",
    "devices": 2, "val": {"accuracy": 1.0, "f1": 0.75}, "tested": {"checkpoint": "best.ckpt", "epoch": 1, "step": 10},
    "test": {"accuracy": 0.5, "loss": 0.25, "images": 10, "per_class": {"a": 1.0}, "top5": 0.99, "macro_f1": 0.49,
             "balanced_accuracy": 0.45, "tta": {"views": "mirror", "accuracy": 0.9, "loss": 0.4}},
}  # fmt: skip
CURVES = f"""step,epoch,train/loss,lr,val/loss,test/loss,{HOSTILE}
5,0,3,0.1,,,1\n10,0,2,0.1,3,4,1\n20,1,1,0.1,2,,1
"""


def data_of(classes: list[str], images: int, side: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (images, side, side, 3), dtype=torch.uint8, generator=generator)
    return SimpleNamespace(
        classes=classes,
        class_counts=torch.full((len(classes),), 5),
        test_images=ImageSet(pixels, torch.zeros(images, dtype=torch.int64), tuple(classes)),
        split=(range(80), range(20)),
    )


def page_of(folder: Path, classes: int = 10, side: int = 32) -> str:
    """Return a report with all of its parts and hostile text in each."""
    run = folder / f"run {HOSTILE}"
    run.mkdir()
    (run / "metrics.csv").write_text(CURVES)
    names = [HOSTILE, "a & b", "_" * 60, *(f"class {number}" for number in range(3, classes))][:classes]
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, classes, (300,), generator=generator)
    logits = torch.randn(300, classes, generator=generator) + 3 * torch.nn.functional.one_hot(labels, classes)
    predictions = {"indices": torch.arange(300), "labels": labels, "probabilities": logits.double().softmax(1)}
    picture = Picture(URI, f"one of {HOSTILE}", (f"label {HOSTILE}", "#1"))
    twins = [Pair(picture, picture)] * 24
    suspects = Suspects(1000, [picture] * 24, 30, 12), Suspects(300, [picture] * 24, 9, 1)
    findings = Findings(*suspects, Duplicates(twins, 2, 1))
    return render(run, METRICS, data_of(names, 300, side), prediction_table(predictions), findings)


def test_headline_and_table_have_one_calibration_error_that_of_the_probabilities_that_are_shipped(
    tmp_path: Path,
) -> None:
    labels = torch.tensor([0, 0, 1, 1])
    table = PredictionTable(torch.arange(4), labels, labels.flip(0), torch.tensor([0.75] * 3 + [0.25]).double())
    calibration = {"error": 0.4, "temperature": 0.5, "tempered_error": 0.625, "source": "a guess"}
    calibration |= {"tempered_perfect": {"mean": 0.1, "high": 0.2}, "perfect": {"mean": 0.3, "high": 0.4}}
    page = render(tmp_path, {"test": {"calibration": calibration}}, data_of(["a", "b"], 4, 8), table, NO_FINDINGS)
    assert "<dt>calibration error</dt><dd>62.50 %</dd>" in page
    assert "without it, the error is 40.00 %" in page and "temperature 0.50 (a guess)" in page
    assert "in 95 % of cases at most 20.00 %:\nthis net is overconfident." in page
    rows = re.findall(r"<tr><td>([^<]*)</td><td>([^<]*)</td><td>(\d+)</td></tr>", page)
    assert rows == [("75.0 %", "0.0 %", "3"), ("25.0 %", "0.0 %", "1")]


def test_mistakes_have_the_name_of_their_file(tmp_path: Path) -> None:
    data = data_of(["a", "b"], 2, 8)
    data.test_images = replace(data.test_images, names=("a/1.png", "b/<2>.png"))
    table = PredictionTable(torch.tensor([1, 0]), torch.tensor([1, 0]), torch.tensor([0, 0]), torch.tensor([0.75, 0.5]))
    page = render(tmp_path, {"seed": 0}, data, table, NO_FINDINGS)
    assert "<span>predicted a 75.0 %</span><span>b/&lt;2&gt;.png</span>" in page
    assert "<dt>seed</dt><dd>0</dd>" in page


def test_untrusted_text_is_escaped_and_every_metric_and_curve_is_shown(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    assert HOSTILE not in page and "<script" not in page
    assert page.count("&lt;img src=x onerror=alert(1)&gt;") > 10
    assert not re.findall(r"(?:src|href)=\"(?!data:|#)[^\"]*", page)
    facts = dict(re.findall(r"<div><dt>([^<]*)</dt><dd>([^<]*)</dd></div>", page))
    assert facts.items() >= {
        "parameters": "7,000", "seed": "7000", "devices": "2 × gpu", "training time": "61.3 s", "test loss": "0.2500",
        "test balanced accuracy": "45.00 %", "test macro F1": "49.00 %", "validation accuracy": "100.00 %",
        "test accuracy with mirror views": "90.00 %", "validation f1": "0.7500", "processor": "a CPU",
        "weights": "best of epoch 1 (step 10)", "commit of cifar-lit": "abc", "finished": "2026-01-02T03:04:05+00:00",
    }.items()  # fmt: skip
    assert "test top-5 accuracy" not in facts  # one class
    assert page.count("<svg") == 1 and "learning rate" not in page
    assert "loss over epochs: training ends at 1, validation ends at 2, test ends at 4" in page
    assert all(f">{part}</text>" in page for part in ("training", "validation", "test", "epochs"))
    assert "config.yaml</code>" in page and "cifar-lit report" in page


def test_classes_are_called_worse_only_beyond_chance_of_as_many_classes(tmp_path: Path) -> None:
    labels = torch.arange(10).repeat_interleave(100)
    for mistakes, line in ((6, "No class is less accurate than all images"), (12, "and not by chance: c3 (p")):
        predicted = labels.clone()
        predicted[300 : 300 + mistakes] = 4  # 1 in 50 of the others is wrong; alone, 6 of 100 would be p = 0.03
        predicted[::50] = (labels[::50] + 5) % 10
        table = PredictionTable(torch.arange(1000), labels, predicted, torch.full((1000,), 0.9).double())
        page = render(tmp_path, {}, data_of([f"c{n}" for n in range(10)], 1000, 8), table, NO_FINDINGS)
        assert line in " ".join(page.split())


def test_a_model_without_curves_has_a_report_with_precision_recall_and_f1(tmp_path: Path) -> None:
    labels, predicted = torch.tensor([0] * 10 + [1] * 10), torch.tensor([0] * 8 + [1] * 2 + [0] * 4 + [1] * 6)
    table = PredictionTable(torch.arange(20), labels, predicted, torch.full((20,), torch.nan).double())
    (tmp_path / "metrics.csv").write_text(CURVES.splitlines()[0] + "\n")  # a header, before the first row
    page = render(tmp_path, {}, data_of(["a", "b", "none"], 20, 8), table, NO_FINDINGS)
    rows = re.findall(r'<th scope="row">(\w+)</th>(.*?)</tr>', page)
    assert [name for name, _ in rows] == ["a", "b", "none", "b", "a", "none"]  # matrix, worst first
    cells = {name: re.findall("<td>([^<]*)", row) for name, row in rows}
    assert cells["a"] == ["80.0 %", "49.0 … 94.3 %", "66.7 %", "72.7 %", "10", "5"]
    assert cells["none"] == ["–", "–", "–", "–", "0", "5"]
    confused = re.findall(r'class="name">([^<]*)</td><td class="name">([^<]*)</td><td>(\d)</td><td>([^<]*)</td>', page)
    assert confused == [("b", "a", "4", "40.0 %"), ("a", "b", "2", "20.0 %")]
    assert '<td class="correct">8</td><td style="background: rgb(214 96 0 / 0.35)">2</td><td></td>' in page
    assert page.count("Not searched yet") == 1  # duplicates
    assert 'id="curves"' not in page
    assert "the training has diverged" in page


def test_curves_are_drawn_over_epochs_and_the_test_at_the_epoch_of_its_weights(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(CURVES)
    lines = {"train": [(0.5, 3), (1, 2), (2, 1)], "val": [(1, 3), (2, 2)], "test": [(1, 4)]}
    assert curves(tmp_path) == {"loss": lines}


# ---- in a browser


@pytest.mark.parametrize(
    ("classes", "side", "scheme", "background"),
    [(10, 28, "light", "rgb(255, 255, 255)"), (100, 224, "dark", "rgb(18, 22, 27)")],
)
def test_the_report_is_small_and_accessible_fits_a_phone_and_works_offline(
    open_page: Open, tmp_path: Path, classes: int, side: int, scheme: str, background: str
) -> None:
    file = tmp_path / "report.html"
    file.write_text(page_of(tmp_path, classes, side))
    assert file.stat().st_size < 2_500_000
    opened = open_page(file.as_uri(), width=400, scheme=scheme)
    assert (opened.overflow, opened.errors, opened.requests, opened.unloaded, opened.nameless) == (0, [], [], [], [])
    page = opened.page
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == background
    assert opened.low_contrasts == []
    assert page.locator("table.matrix").count() == (classes == 10)
    assert page.evaluate("getComputedStyle(document.querySelector('svg text')).fontFamily").startswith("system-ui")

    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the results"
    assert page.locator(".skip").bounding_box()["x"] >= 0  # type: ignore[index]
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "summary"
    assert page.locator(".box:not([tabindex='0']), pre:not([tabindex='0'])").count() == 0
    levels = page.locator("h1, h2, h3, h4").evaluate_all("all => all.map(heading => Number(heading.tagName[1]))")
    assert (levels[0], levels.count(1)) == (1, 1)
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_several_labels_have_their_numbers_and_confusions_also_without_a_test_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = torch.tensor([[1.0, 1, -1]] + [[1.0, 0, 0]] * 5 + [[0.0, 1, 0]] * 4)
    probabilities = torch.tensor(
        [[0.9, 0.1, 0.9]] + [[0.9, 0.1, 0.1]] * 2 + [[0.2, 0.95, 0.1]] * 3 + [[0.1, 0.9, 0.2]] * 4
    )
    metrics = {"test": label_results(probabilities, labels, [0.5] * 3, "abc")}
    data = data_of(["a", "b", HOSTILE], 10, 8)
    metrics["test"]["labels"][HOSTILE] = metrics["test"]["labels"].pop("c")  # type: ignore[attr-defined]
    predictions = {"labels": labels, "probabilities": probabilities}
    figures, draw = [], report.precision_recall_figure
    monkeypatch.setattr(report, "precision_recall_figure", lambda lines: figures.append(draw(lines)) or figures[0])
    page = render(tmp_path, json.loads(json.dumps(metrics)), data, predictions, NO_FINDINGS)
    worst, *others = figures[0].axes[0].lines
    assert (worst.get_label(), [line.get_label() for line in others]) == ("b", ["a"])
    assert (0.8, pytest.approx(4 / 7)) in zip(worst.get_xdata().round(6), worst.get_ydata(), strict=True)  # at 0.9
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', page)
    assert [name[:4] for name, _ in rows] == ["b", "a", "&lt;"] and HOSTILE not in page  # the worst first
    cells = [re.findall("<td>([^<]*)", row) for _, row in rows]
    assert cells[1][0] == "100.0 %" and cells[1][2:] == ["0.500", "100.0 %", "50.0 %", "66.7 %", "6", "5"]
    assert cells[2] == ["–", "–", "0.500", "–", "–", "–", "0", "5"]
    confused = re.findall(r'class="name">([^<]*)</td><td class="name">([^<]*)</td><td>(\d)</td><td>([^<]*)</td>', page)
    assert confused == [("a", "b", "1", "16.7 %"), ("b", "a", "1", "20.0 %"), ("a", "b", "3", "50.0 %")]
    assert page.count('aria-label="precision over recall of b, a"') == 1
