"""The page of `cifar-lit review` in a browser: keys and buttons, new classes, layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from browser import Open
from contract.command_line import draw_folder, rows_of
from extras.serving import Running, running
from inference.small_nets import write_net

from cifar_lit.data.datamodule import ImageData
from cifar_lit.inference.logits import FEATURES, OUT_OF_FOLD
from cifar_lit.runs.label_errors import list_training_labels

pytestmark = pytest.mark.slow

pytest.importorskip("uvicorn", reason="pip install 'cifar-lit[serve]'")

CLASSES = ["0", "1", "10", "2", "W" * 150, "star"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("review")
    draw_folder(folder / "set", {f"{part}/{name}": 2 for part in ("train", "test") for name in CLASSES})
    run = write_net(folder / "run-1", "lenet", side=16, classes=CLASSES)
    settings: dict[str, Any] = {"dataset": "folder", "root": str(folder / "set"), "val_size": 0}
    settings |= {"images": {"image_size": 16}, "loading": {"cache_dir": str(folder / "cache")}}
    (run / "config.yaml").write_text(yaml.safe_dump({"data": settings}))
    images = ImageData(**settings).train_images
    predicted = torch.where(torch.arange(12) < 6, 5, images.labels)  # the first six labels are suspected
    np.save(run / OUT_OF_FOLD, torch.eye(6)[predicted].numpy())
    np.save(run / FEATURES, np.eye(12, dtype=np.float16))
    list_training_labels(run, images, ["train"] * 12)
    return run


@pytest.fixture(scope="module")
def review(run: Path) -> Iterator[Running]:
    with running(run, "--trust", command="review") as opened:
        yield opened


@pytest.mark.parametrize(("width", "height", "scheme"), [(390, 844, "dark"), (1280, 800, "light")])
def test_the_page_fits_its_window_and_shows_where_the_focus_is(
    review: Running, open_page: Open, width: int, height: int, scheme: str
) -> None:
    opened = open_page(review.url, width=width, height=height, scheme=scheme)
    opened.page.wait_for_selector("[aria-busy=false] #review:not([hidden])")
    assert (opened.overflow, opened.low_contrasts, opened.unloaded, opened.nameless) == (0, [], [], [])
    assert opened.page.locator("#nearest img").count() == 5
    assert opened.page.evaluate("document.getElementById('picture').classList.contains('pixels')")  # 16 pixels
    for name in ("filter", "keys", "write", "keep"):
        opened.page.keyboard.press("Tab")
        assert opened.page.evaluate("document.activeElement.id") == name
    assert opened.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_labels_are_reviewed_with_keys_and_buttons(review: Running, run: Path, open_page: Open) -> None:
    opened = open_page(review.url)
    page = opened.page

    def after(count: int, what: str = "6 suspected labels") -> None:
        page.locator("[aria-busy=false] #progress", has_text=f"{count} of {what} reviewed").wait_for()

    after(0)
    first = page.inner_text("#question")
    for count, key in enumerate(("2", "0"), 1):  # classes with these names
        page.keyboard.press(key)
        after(count)
    page.keyboard.press("5")  # no class
    page.get_by_role("button", name="Drop").click()
    after(3)
    page.keyboard.press("b")
    page.locator("[aria-busy=false] #detail", has_text="Decided: drop").wait_for()
    page.keyboard.press("d")
    page.locator("[aria-busy=false] #detail:not(:has-text('Decided'))").wait_for()
    page.focus("#filter")  # keys are decisions there too, although "s" begins the name of a class
    page.keyboard.press("s")
    page.locator("[aria-busy=false] #progress", has_text="3 of 6 suspected labels reviewed").wait_for()
    page.locator("#progress", has_text="1 skipped").wait_for()
    assert page.input_value("#filter") == ""
    page.keyboard.press("/")
    page.keyboard.type("star")
    page.keyboard.press("Escape")  # shows all classes again, with their keys
    assert page.locator("#classes kbd").all_inner_texts() == ["0", "1", "2"] and page.input_value("#search") == ""
    page.keyboard.press("/")
    page.keyboard.type(" Great  heron")
    questions: list[str] = []
    page.once("dialog", lambda dialog: (questions.append(dialog.message), dialog.dismiss()))
    page.keyboard.press("Enter")
    assert questions == ["There is no class “Great heron” yet. Add it?"]
    page.keyboard.press("s")  # further letters are still part of the name, not decisions
    assert page.input_value("#search") == " Great  herons"
    page.keyboard.press("Backspace")
    page.once("dialog", lambda dialog: dialog.accept())
    page.keyboard.press("Enter")
    after(4)
    page.locator("#classes button", has_text="Great heron").click()  # listed from now on, without a search
    after(5)
    assert page.inner_text("#bound") == "The suspected labels end here"
    assert page.inner_text("#rest") == "Of 6 suspected labels, 5 were wrong."  # one is open
    page.reload()  # and going back does not end there
    page.locator("#beyond").wait_for()
    for _ in range(6):
        page.keyboard.press("b")
        page.wait_for_selector("[aria-busy=false]")
    assert page.inner_text("#question") == first and "Decided: relabel 2" in page.inner_text("#detail")
    page.keyboard.press("k")  # decides again
    page.get_by_role("button", name="Show skipped").click()
    page.locator("[aria-busy=false] #review:not([hidden])").wait_for()
    page.keyboard.press("k")
    after(6)
    assert page.inner_text("#rest") == "Of 6 suspected labels, 4 were wrong. Among the 6 others, expect hardly any."
    page.locator("#beyond").click()
    after(6, "12")
    page.uncheck("#keys")
    page.keyboard.press("k")  # speech input may press it (WCAG 2.1.4)
    page.keyboard.press("Control+z")
    page.locator("[aria-busy=false] #detail", has_text="Decided: keep").wait_for()
    after(6, "12")
    page.check("#keys")
    page.keyboard.press("w")
    page.locator("#written", has_text="23 rows are written").wait_for()
    assert "--data-dir" in page.inner_text("#command")
    rows = {row["path"]: row for row in rows_of(run / "labels-reviewed.csv")}
    made = [row["label"] for row in rows.values() if row["reviewed"]]
    assert sorted(made) == sorted(["0", "1", "Great heron", "Great heron", first.split("“")[1].split("”")[0]])
    assert [url for url in opened.requests if not url.startswith((review.url, "data:"))] == []
    assert opened.errors == []
