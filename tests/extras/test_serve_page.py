"""The page of `cifar-lit serve` in a browser: input, results, errors and layout."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Open, Opened
from extras.serving import Running, picture, running

import cifar_lit
from cifar_lit.inference.rejection import caveat

pytestmark = pytest.mark.slow

pytest.importorskip("uvicorn", reason="pip install 'cifar-lit[serve]'")

DROP = """([base64, kind]) => {
    const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
    const files = new DataTransfer();
    files.items.add(new File([bytes], 'cat.jpg'));
    if (kind === 'paste') dispatchEvent(new ClipboardEvent('paste', {clipboardData: files}));
    else dispatchEvent(new DragEvent('drop', {dataTransfer: files, cancelable: true}));
}"""


@pytest.fixture(scope="module")
def service(served_run: Path) -> Iterator[Running]:
    with running(served_run) as opened:
        yield opened


def give(opened: Opened, data: bytes, how: str) -> None:
    """Drop, paste or choose a file."""
    if how != "choose":
        opened.page.evaluate(DROP, [base64.b64encode(data).decode(), how])
        return
    opened.page.keyboard.press("Tab")
    opened.page.set_input_files("#file:focus", {"name": "cat.jpg", "mimeType": "image/jpeg", "buffer": data})


@pytest.mark.parametrize(
    ("how", "scheme", "width"), [("drop", "light", 400), ("paste", "dark", 1200), ("choose", "light", 800)]
)
def test_a_picture_is_classified_after_an_unreadable_one(
    service: Running, served_run: Path, open_page: Open, how: str, scheme: str, width: int, tmp_path: Path
) -> None:
    (tmp_path / "cat.jpg").write_bytes(picture())
    (best,) = cifar_lit.load(served_run).predict(tmp_path / "cat.jpg")
    opened = open_page(service.url, width=width, scheme=scheme)
    page = opened.page
    page.locator("#about", has_text="lenet predicts 4 classes: cat, dog, eel, fox.").wait_for()
    page.locator("summary").click()
    assert f"{service.url}/predict" in page.inner_text("details")
    page.evaluate("document.activeElement.blur()")
    give(opened, picture()[:400], "drop")
    page.locator("#error", has_text="the image cannot be read: cut short").wait_for()
    assert opened.low_contrasts == []
    opened.errors.clear()  # the console has the status 422
    page.reload()
    give(opened, picture(), how)
    page.wait_for_selector("#answer:not([hidden])")
    assert page.text_content("#verdict") == best.label
    assert str(page.get_by_role("status").text_content()).startswith(f"{best.label}, with a probability of ")
    shares = [float(text.strip("<> %")) / 100 for text in page.locator("#bars .share").all_text_contents()]
    assert shares[0] == pytest.approx(best.probability, abs=0.001) and len(shares) == 4
    seen = "document.getElementById('seen')"
    assert page.evaluate(f"{seen}.decode().then(() => {seen}.naturalWidth)") == 16
    page.evaluate("Promise.all(document.getAnimations().map((animation) => animation.finished))")  # the bars
    assert (opened.unloaded, opened.nameless, opened.errors, opened.low_contrasts) == ([], [], [], [])
    assert opened.overflow <= 0
    assert [url for url in opened.requests if not url.startswith((service.url, "blob:", "data:"))] == []


def test_the_page_explains_unknown_pictures_and_prediction_sets(reject_run: Path, open_page: Open) -> None:
    with running(reject_run, "--reject", "0.05", "--coverage", "0.5") as service:
        opened = open_page(service.url)
        give(opened, picture(), "drop")
        opened.page.locator("#verdict", has_text="unknown").wait_for()
        assert opened.page.inner_text("#caveat") == caveat(0.05)  # in the words of `classify`
        assert opened.page.inner_text("#set").startswith("Prediction set: ")
        assert "50.0 % of such sets contain the true class" in opened.page.inner_text("#set")
