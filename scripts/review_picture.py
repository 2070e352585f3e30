"""Draw the picture of docs/label-errors.md: `python scripts/review_picture.py RUN`.

Starts `cifar-lit review` on a copy of a run, drives its page in Chromium, and writes docs/pictures/review.png. RUN is
the folder of a cross-validation, whose runs lie beside it. Needs playwright and Chromium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml
from PIL import Image
from playwright.sync_api import Page, sync_playwright

FILE = Path(__file__).parent.parent / "docs" / "pictures" / "review.png"
WIDTH, HEIGHT = 900, 850  # window, in pixels
SHOWN_WIDTH = 480  # frame, in pixels
GAP, COLUMNS = 8, 3
KEYS = ("", "p", "p", "p", "/")  # one frame after each key; the last one searches a class
COLOURS = 200


def frames(page: Page) -> list[Image.Image]:
    """Press the keys, and return a picture of the page after each."""
    pictures = []
    for key in (*KEYS, "End"):
        if key == "/":
            page.keyboard.press(key)
            page.keyboard.type("do")
        elif key == "End":  # the whole class is reviewed
            page.keyboard.press("Escape")
            page.select_option("#filter", index=1)
            page.evaluate("document.activeElement.blur()")
            while page.locator("#review").is_visible():
                page.keyboard.press("k")
                page.wait_for_timeout(50)
            page.get_by_role("button", name="Write").click()
            page.locator("#written", has_text="rows").wait_for()
        elif key:
            page.keyboard.press(key)
        page.wait_for_selector("[aria-busy=false]")
        page.wait_for_timeout(200)
        pictures.append(Image.open(BytesIO(page.screenshot())).convert("RGB"))
    return pictures


def draw(run: Path) -> None:
    """Review a copy of the run, and write the picture."""
    with TemporaryDirectory() as folder:
        logs = Path(folder) / "lightning_logs"
        shutil.copytree(run, logs / run.name, ignore=shutil.ignore_patterns("review.jsonl", "labels-reviewed.csv"))
        for other in run.parent.glob("*-*"):
            if other.name != run.name:
                (logs / other.name).symlink_to(other.absolute())
        config = next(path for path in (run / "config.yaml", *run.parent.glob("*/config.yaml")) if path.is_file())
        images = Path(yaml.safe_load(config.read_text())["data"]["root"]).absolute()
        command = [sys.executable, "-m", "cifar_lit", "review", f"lightning_logs/{run.name}", "--port", "0"]
        command += ["--limit", "100", "--data-dir", str(images)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as service:
            assert service.stdout is not None
            address = service.stdout.readline().partition(" at ")[2].split()[0]
            with sync_playwright() as playwright:
                chromium = shutil.which("chromium") or shutil.which("google-chrome")
                browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
                page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
                page.goto(address)
                page.wait_for_selector("#review:not([hidden])")
                pictures = frames(page)
                browser.close()
            service.terminate()
            service.communicate()
    size = SHOWN_WIDTH, round(HEIGHT * SHOWN_WIDTH / WIDTH)
    rows = -(-len(pictures) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * (size[0] + GAP) + GAP, rows * (size[1] + GAP) + GAP), "#8a93a6")
    for number, picture in enumerate(pictures):
        place = (number % COLUMNS * (size[0] + GAP) + GAP, number // COLUMNS * (size[1] + GAP) + GAP)
        sheet.paste(picture.resize(size, Image.Resampling.LANCZOS), place)
    sheet.quantize(COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(FILE, optimize=True)
    print(f"{FILE.name}: {FILE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
