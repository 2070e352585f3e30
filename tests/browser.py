"""A real browser for tests: Chromium, driven by Playwright, that tells what went wrong on a page and what it asked for."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FLAGS = (
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",  # nothing but this machine
)

CONTRASTS = """() => {
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
    if (!one.checkVisibility() || one.closest('.hidden')) continue;
    const style = getComputedStyle(one), svg = one.namespaceURI.includes('svg');
    if (svg && one.tagName !== 'text') continue;
    const both = [number(svg ? style.fill : style.color), ground(svg ? one.closest('figure') : one)].map(light);
    const contrast = (Math.max(...both) + .05) / (Math.min(...both) + .05);
    if (!(contrast >= 4.5)) low.push(`${one.tagName} ${one.textContent.trim().slice(0, 20)} ${contrast.toFixed(2)}`);
  }
  return low;
}"""


@dataclass
class Opened:
    """A page that is open.

    errors: what the console and uncaught exceptions said of errors so far. requests: addresses that it asked for besides the
    one it was opened by; data URIs are none.
    """

    page: Page
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    @property
    def overflow(self) -> int:
        """Pixels by which the page is wider than its window: above 0 it scrolls sideways."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    @property
    def unloaded(self) -> list[str]:
        """Beginnings of the addresses of images that did not load, or have nothing in them."""
        script = "[...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.currentSrc.slice(0, 80))"
        return list(self.page.evaluate(script))

    @property
    def nameless(self) -> list[str]:
        """Beginnings of images and figures that a screen reader could not name: without alternative text."""
        script = """[...document.querySelectorAll('img, svg, canvas')].filter(i => !i.closest('[aria-hidden="true"]')
            && !(i.getAttribute('alt') || i.getAttribute('aria-label') || i.querySelector('title')))
            .map(i => i.outerHTML.slice(0, 80))"""
        return list(self.page.evaluate(script))

    @property
    def low_contrasts(self) -> list[str]:
        """Texts that show, with a contrast to what lies behind them of less than 4.5 (WCAG 2)."""
        return list(self.page.evaluate(CONTRASTS))


Open = Callable[..., Opened]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium for the tests of one file; they skip themselves where there is none.

    Of one file only: while it is open, nothing else in the process can have an event loop of its own.
    """
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    with sync.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens pages: `open_page(url, width=400, height=800, scheme="dark")` gives an `Opened`; they close with the test."""
    contexts: list[Any] = []

    def opened(url: str, width: int = 1200, height: int = 800, scheme: Literal["light", "dark"] = "light") -> Opened:
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        opening = Opened(page)
        page.on("console", lambda message: opening.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: opening.errors.append(str(error)))
        page.on("request", lambda request: opening.requests.append(request.url))
        page.goto(url)
        del opening.requests[0]
        return opening

    yield opened
    for context in contexts:
        context.close()
