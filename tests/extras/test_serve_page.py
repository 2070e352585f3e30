"""The page of `cifar-lit serve` in a browser: input, results, errors and layout."""

from __future__ import annotations

import base64

import pytest
from browser import Open, Opened
from extras.serving import Service, picture
from inference.small_nets import CLASSES

pytestmark = pytest.mark.slow

DROP = """([base64, name, kind, how]) => {
    const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
    const files = new DataTransfer();
    if (base64) files.items.add(new File([bytes], name, {type: kind}));
    if (how === 'paste') dispatchEvent(new ClipboardEvent('paste', {clipboardData: files, bubbles: true}));
    else for (const event of ['dragover', 'drop']) document.getElementById('drop').dispatchEvent(
        new DragEvent(event, {dataTransfer: files, bubbles: true, cancelable: true}));
}"""


def give(opened: Opened, data: bytes, name: str = "cat.jpg", kind: str = "image/jpeg", how: str = "drop") -> None:
    """Drop or paste a file."""
    opened.page.evaluate(DROP, [base64.b64encode(data).decode(), name, kind, how])


def choose(opened: Opened) -> None:
    """Choose a file with the keyboard."""
    opened.page.keyboard.press("Tab")
    assert opened.page.evaluate("document.activeElement.id") == "file"
    assert opened.page.evaluate("getComputedStyle(document.getElementById('drop')).outlineStyle") == "solid"
    with opened.page.expect_file_chooser() as chooser:
        opened.page.wait_for_timeout(300)  # Chromium must register the listener first
        opened.page.keyboard.press("Enter")
    chooser.value.set_files({"name": "cat.jpg", "mimeType": "image/jpeg", "buffer": picture()})


@pytest.mark.parametrize("how", ["drop", "paste", "choose"])
def test_a_picture_is_classified_and_announced_to_screen_readers(service: Service, open_page: Open, how: str) -> None:
    opened = open_page(service.url)
    page = opened.page
    choose(opened) if how == "choose" else give(opened, picture(), how=how)
    page.wait_for_selector("#answer:not([hidden])")
    best = service.predict(picture(), query="?top=10").json
    assert page.text_content("#verdict") == best["label"]
    assert str(page.get_by_role("status").text_content()).startswith(f"{best['label']}, ")
    assert page.locator("#bars .name").all_text_contents() == [entry["label"] for entry in best["top"]]
    probabilities = [entry["probability"] for entry in best["top"]]
    shares = [float(text.strip("<> %")) / 100 for text in page.locator("#bars .share").all_text_contents()]
    assert shares == pytest.approx(probabilities, abs=0.001)
    page.wait_for_timeout(400)  # the animation of the bars
    width = "bar => bar.getBoundingClientRect().width / bar.parentElement.clientWidth"
    widths = page.evaluate(f"[...document.querySelectorAll('.bar')].map({width})")
    assert widths == pytest.approx(probabilities, abs=0.01)
    seen = "document.getElementById('seen')"
    assert page.evaluate(f"{seen}.decode().then(() => {seen}.naturalWidth)") == 16
    assert (opened.unloaded, opened.nameless, opened.errors) == ([], [], [])
    assert [url for url in opened.requests if not url.startswith((service.url, "blob:", "data:"))] == []


def test_the_page_shows_its_limits_and_an_error_until_the_next_picture(service: Service, open_page: Open) -> None:
    opened = open_page(service.url)
    page = opened.page
    page.locator("#about", has_text="classes").wait_for()
    assert page.text_content("#about") == f"lenet predicts 4 classes: {', '.join(CLASSES)}."
    page.locator("summary").click()
    assert f"{service.url}/predict" in page.inner_text("details")
    assert "Limits of a request: 2 MB" in page.inner_text("#limits")
    for data, name, text in (
        (picture()[:400], "cat.jpg", "The image cannot be read: cut short; save or send it again."),
        (b"text", "notes.txt", "not a JPEG"),
        (bytes(2_100_000), "large.jpg", "large.jpg has 2.1 MB"),
        (b"", "cat.jpg", "is not a file"),
    ):
        give(opened, data, name)
        page.locator("#error", has_text=text).wait_for()
    give(opened, picture())
    page.wait_for_selector("#answer:not([hidden])")
    assert page.locator("#error").is_hidden()


@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (1200, "dark")])
def test_the_page_is_legible_and_fits_its_window(service: Service, open_page: Open, width: int, scheme: str) -> None:
    opened = open_page(service.url, width=width, scheme=scheme)
    opened.page.locator("summary").click()
    for data, shown in ((picture()[:400], "#error"), (picture(), "#answer")):
        give(opened, data)
        opened.page.wait_for_selector(f"{shown}:not([hidden])")
        assert opened.low_contrasts == []
    assert opened.overflow <= 0
    background = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background.strip("rgb()").split(","))) < 200) == (scheme == "dark")
