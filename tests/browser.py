"""A real browser for tests: Chromium, driven by Playwright. It records the errors and requests of each page."""

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
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",  # this machine only
)

CONTRASTS = """() => {
  const number = text => text.match(/[\\d.]+/g).map(Number);
  const linear = x => x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => .2126 * linear(r / 255) + .7152 * linear(g / 255) + .0722 * linear(b / 255);
  const blend = ([r, g, b, a = 1], under) => [r, g, b].map((x, i) => a * x + (1 - a) * under[i]);
  const background = element => {
    if (!element) return [255, 255, 255];
    const color = number(getComputedStyle(element).backgroundColor);
    return blend(color, color[3] === undefined ? color : background(element.parentElement));
  };
  const low = [];
  for (const element of document.querySelectorAll('body *')) {
    const text = element.textContent.trim(), svg = element.namespaceURI.includes('svg');
    if (![...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim())) continue;
    if (!element.checkVisibility() || element.closest('.hidden') || svg && element.tagName !== 'text') continue;
    const style = getComputedStyle(element), behind = svg ? element.closest('figure') : element;
    const both = [number(svg ? style.fill : style.color), background(behind)].map(luminance);
    const contrast = (Math.max(...both) + .05) / (Math.min(...both) + .05);
    if (!(contrast >= 4.5)) low.push(`${element.tagName} ${text.slice(0, 20)} ${contrast.toFixed(2)}`);
  }
  return low;
}"""


@dataclass
class Opened:
    """An open page."""

    page: Page
    errors: list[str] = field(default_factory=list)  # from the console and uncaught exceptions
    requests: list[str] = field(default_factory=list)  # without the page itself and data URIs

    @property
    def overflow(self) -> int:
        """Return the pixels by which the page is wider than its window; above 0 it scrolls sideways."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    @property
    def unloaded(self) -> list[str]:
        """Return the start of the address of each image that did not load or is empty."""
        script = "[...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.currentSrc.slice(0, 80))"
        return list(self.page.evaluate(script))

    @property
    def nameless(self) -> list[str]:
        """Return the start of each image or figure without alternative text for screen readers."""
        script = """[...document.querySelectorAll('img, svg, canvas')].filter(i => !i.closest('[aria-hidden="true"]')
            && !(i.getAttribute('alt') || i.getAttribute('aria-label') || i.querySelector('title')))
            .map(i => i.outerHTML.slice(0, 80))"""
        return list(self.page.evaluate(script))

    @property
    def low_contrasts(self) -> list[str]:
        """Return visible texts whose contrast to their background is below 4.5 (WCAG 2)."""
        return list(self.page.evaluate(CONTRASTS))


Open = Callable[..., Opened]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start Chromium for the tests of one file, or skip them.

    The scope is the file because no other event loop can run in the process while Chromium is open.
    """
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    launch = {"executable_path": chromium, "args": list(FLAGS)}
    with sync.sync_playwright() as playwright, playwright.chromium.launch(**launch) as opened:
        yield opened


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Return open_page(url, width, height, scheme); the test's end closes its pages."""
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
