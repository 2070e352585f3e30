"""`cifar-lit report` and the report.html of a training."""

from __future__ import annotations

import json
import re
import shutil
import webbrowser
from pathlib import Path

import numpy as np
import pytest
from browser import Open
from contract.command_line import assert_refused, draw_folder, metrics_of, rows_of, run_command
from inference.small_nets import write_net

CLASSES = ["circle", "square", "triangle", "star"]


@pytest.fixture
def own(run_dir: Path) -> Path:
    """Return a copy of the run in the working folder."""
    return Path(shutil.copytree(run_dir, "own-1"))


@pytest.fixture
def model() -> Path:
    """Return a model file with a net of two classes, without a run."""
    return write_net(Path("bare"), "lenet", side=16, classes=["a", "b"]) / "model.safetensors"


def headline(page: str) -> dict[str, str]:
    return dict(re.findall(r"<div><dt>([^<]+)</dt><dd>([^<]+)</dd></div>", page))


def draw_images(folder: str, classes: str = "ab", size: int = 16) -> None:
    first, second = classes
    counts = {f"train/{first}": 5, f"train/{second}": 5, f"test/{first}": 2, f"test/{second}": 3}
    draw_folder(Path(folder), counts, size)


def test_report_adds_label_errors_and_duplicates(own: Path, open_page: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    first = (own / "report.html").read_text()
    monkeypatch.setattr(webbrowser, "open", opened.append)
    answer = run_command("report", "own-1", "--open")
    assert answer.code == 0, answer.err
    assert re.fullmatch(r"report own-1/report\.html · \d\.\d MB\n", answer.out)
    assert first.count("Not searched yet") == 1  # a training does not search for duplicates
    page = (own / "report.html").read_text()
    assert "Not searched yet" not in page
    assert "own-1 has no label_errors.csv: its net was trained on these labels and may have learned wrong ones." in page
    assert "To find them, train with --folds 5 or --recipe finetune, and review that run" in page
    test = metrics_of(own)["test"]
    calibration_error = f"{100 * test['calibration']['tempered_error']:.2f} %"
    assert headline(page)["calibration error"] == headline(first)["calibration error"] == calibration_error
    wrong = sum(row["label"] != row["predicted"] for row in rows_of(own / "predictions.csv"))
    for each in (first, page):
        assert re.search(rf"Suspected labels of 40 test images: {wrong}\.", each)
        shown = re.findall(r"<span>label (\w+) [\d.]+ %</span>\s*<span>predicted (\w+) ", each)
        assert shown and not [pair for pair in shown if len({*pair}) == 1]
    assert headline(page)["test accuracy"] == f"{100 * test['accuracy']:.2f} %"
    assert "cifar-lit test own-1" in page
    assert opened == [(own / "report.html").absolute().as_uri()]
    view = open_page(opened[0], width=400, scheme="dark")
    assert (view.overflow, view.errors, view.requests, view.unloaded, view.nameless) == (0, [], [], [], [])


def test_saved_predictions_are_used_only_for_the_same_test_images(own: Path) -> None:
    labels = [CLASSES.index(row["label"]) for row in rows_of(own / "predictions.csv")]
    np.save(own / "probabilities.npy", np.eye(4, dtype=np.float32)[labels])
    run_command("report", "own-1")
    assert headline((own / "report.html").read_text())["test accuracy"] == "100.00 %"
    metrics = metrics_of(own)
    metrics["test"]["fingerprint"] = "0" * 64
    (own / "metrics.json").write_text(json.dumps(metrics))
    answer = run_command("report", "own-1")
    assert "the run was tested on other images: evaluating these test images now" in answer.err
    found = headline((own / "report.html").read_text())
    assert found["test accuracy"] == f"{100 * metrics['test']['accuracy']:.2f} %"
    assert "test loss" not in found


def test_a_model_without_a_run_is_evaluated_on_the_given_data(model: Path) -> None:
    draw_images("images")
    shutil.copy("images/train/a/0.png", "images/test/b/twin.png")
    Path("bare/config.yaml").write_text("data: {dataset: folder, root: elsewhere}")
    answer = run_command("report", model, "--data-dir", "images", "--out", "page.html")
    assert answer.code == 0, answer.err
    page = Path("page.html").read_text()
    assert headline(page)["test images"] == "6"
    assert re.search(
        r"\b1 of 6 test images\s+is identical to a training image, 1 of\s+them with a different label", page
    )


def test_test_images_are_not_compared_with_themselves(model: Path) -> None:
    draw_folder(Path("images"), {"a": 7, "b": 8}, 16)
    settings = "{dataset: folder, root: images, split: {folds: 5, fold: 1}}"
    Path("bare/config.yaml").write_text(f"data: {settings}")
    assert run_command("report", "bare").code == 0
    page = Path("bare/report.html").read_text()
    assert re.search(r"\b0 of [2-5] test images\s+are identical to a training image", page)


def test_a_class_that_was_added_since_the_training_is_left_out(model: Path) -> None:
    draw_images("images")
    draw_folder(Path("images"), {"train/0": 5, "test/0": 2}, 16)  # the first one: all labels move
    Path("bare/config.yaml").write_text("data: {dataset: folder, root: images}")
    answer = run_command("report", "bare")
    learn = "To learn: cifar-lit train --config bare/config.yaml --weights bare --data-dir images"
    line = f"bare does not know 0, whose images are not used here. {learn}"
    assert (answer.code, answer.error_lines[0]) == (0, line)
    page = Path("bare/report.html").read_text()
    assert headline(page)["test images"] == "5" and "<td>0</td>" not in page


def test_data_that_does_not_fit_the_net_is_refused(model: Path) -> None:
    draw_images("others", "ac")
    draw_images("large", size=20)
    draw_images("elsewhere")

    def refuse(code: int, line: str, *words: str) -> None:
        assert_refused(run_command("report", "bare", *words), code, line)

    refuse(2, "bare has no config.yaml that names the data: name the folder of the run")
    place = "nowhere/page.html cannot be written: name a file in another folder with --out"
    Path("bare/config.yaml").write_text("data: {dataset: folder}")
    refuse(2, place, "--data-dir", "others", "--out", "nowhere/page.html")
    line = (
        "the data has other classes (2: a, c) than the net (2: a, b): give the folder of its own data with --data-dir"
    )
    refuse(1, line, "--data-dir", "others")
    Path("bare/config.yaml").write_text("data: {dataset: folder, root: large}")
    refuse(1, "the images are 3×20×20, but the net takes 3×16×16: give the folder of its own data with --data-dir")
    Path("bare/config.yaml").write_text("data: {dataset: folder, root: images}\n")
    refuse(2, "images does not exist: --data-dir must name a folder with ")
    assert run_command("report", "bare", "--data-dir", "elsewhere").code == 0
