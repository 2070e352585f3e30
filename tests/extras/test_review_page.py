"""The page of `cifar-lit review` in a browser: keys and buttons, new classes, layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from browser import Open
from contract.command_line import draw_folder, rows_of
from extras.serving import Running, running
from inference.small_nets import write_net

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
    for name in ("filter", "write", "keep"):
        opened.page.keyboard.press("Tab")
        assert opened.page.evaluate("document.activeElement.id") == name
    assert opened.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_labels_are_reviewed_with_keys_and_buttons(review: Running, run: Path, open_page: Open) -> None:
    opened = open_page(review.url)
    page = opened.page

    def after(count: int) -> None:
        page.locator("[aria-busy=false] #progress", has_text=f"{count} of 12 reviewed").wait_for()

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
    after(4)
    assert page.input_value("#filter") == ""
    page.keyboard.press("/")
    page.keyboard.type(" Great  heron")
    page.keyboard.press("Enter")
    after(5)
    page.locator("#classes button", has_text="Great heron").click()  # listed from now on, without a search
    after(6)
    page.reload()  # and going back does not end there
    page.locator("#classes button", has_text="Great heron").wait_for()
    for _ in range(6):
        page.keyboard.press("b")
        page.wait_for_selector("[aria-busy=false]")
    assert page.inner_text("#question") == first and "Decided: relabel 2" in page.inner_text("#detail")
    page.keyboard.press("k")  # decides again
    after(6)
    page.keyboard.press("w")
    page.locator("#written", has_text="23 rows are written").wait_for()
    assert "--data-dir" in page.inner_text("#command")
    rows = {row["path"]: row for row in rows_of(run / "labels-reviewed.csv")}
    made = [row["label"] for row in rows.values() if row["reviewed"]]
    assert sorted(made) == sorted(["0", "Great heron", "Great heron", first.split("“")[1].split("”")[0]])
    assert [url for url in opened.requests if not url.startswith((review.url, "data:"))] == []
    assert opened.errors == []
