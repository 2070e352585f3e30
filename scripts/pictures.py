"""Draw the pictures of README.md, docs/ and results/ from trainings: `python scripts/pictures.py [NAME …]`.

`drawn` (of README.md and docs/first-steps.md) trains the quickstart recipe, once as it is and once on few images.
`terminal`, `report`, `serve`, `tensorboard` and `hparams` train it with three settings, `review` fine-tunes on images
of CIFAR-10 with wrong labels. Without names, all are drawn, in about ten minutes on two CPU cores. Pages are opened in
Chromium, driven by playwright. Nothing is downloaded if `--data-dir` has CIFAR-10.
"""

from __future__ import annotations

import argparse
import csv
import html
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import urlopen

import lightning as L
import matplotlib.pyplot as plt
import numpy as np
import torch
import yaml
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright
from torch import Tensor

from cifar_lit import ImageClassifier, ImageData
from cifar_lit.cli.flags import recipe_path
from cifar_lit.data.augment import Augment

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "pictures"
RESULTS = ROOT / "results" / "pictures"
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#999999"
WIDTH = 8.4  # inches
SMALL = 8  # points
WATCHED = 28  # a test image
WATCHED_STEPS = (0, 141, 282, 564)  # untrained, and after epochs 1, 2 and 4
FEW_IMAGES, MANY_EPOCHS = 600, 40
RUNS: tuple[tuple[str, ...], ...] = ((), ("--lr", "0.005"), ("--net", "lenet"))  # flags of quickstart-1, -2 and -3
COLOURS = 200  # at most, in a picture of a page
REVIEWED = 200  # images of each class, of which one in WRONG has another label
WRONG = 20
REVIEW_KEYS = ("", "p", "p", "p", "/")  # one frame after each key; the last one searches a class
REVIEW_WINDOW = (900, 850)  # pixels
FRAME_WIDTH, GAP, COLUMNS = 480, 8, 3


class Watch(Callback):
    """Record the class probabilities of one image at WATCHED_STEPS.

    Args:
        image: uint8 (H, W, C).
    """

    def __init__(self, image: Tensor) -> None:
        self.image = image
        self.probabilities: dict[int, list[float]] = {}

    def _record(self, trainer: Any, module: L.LightningModule) -> None:
        if trainer.global_step not in WATCHED_STEPS:
            return
        images = trainer.datamodule.preprocessing.normalise(self.image[None].to(module.device))
        module.eval()
        with torch.no_grad():
            self.probabilities[trainer.global_step] = module(images)[0].softmax(0).tolist()
        module.train()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the untrained net."""
        self._record(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        """Record the net after a step."""
        self._record(trainer, pl_module)


@dataclass
class Run:
    """A training: its data, rows of metrics.csv, the watched image, and test probabilities (N, classes)."""

    data: ImageData
    rows: list[dict[str, str]]
    watch: Watch
    probabilities: Tensor

    def curve(self, name: str) -> tuple[list[float], list[float]]:
        """Return epochs and values of one logged value."""
        rows = [row for row in self.rows if row.get(name)]
        steps = self.data.train_loader
        return [(float(row["step"]) + 1) / len(steps) for row in rows], [float(row[name]) for row in rows]


def train(epochs: int | None = None, **settings: Any) -> Run:
    """Train the quickstart recipe, with another number of epochs or other settings of the data if given."""
    recipe = yaml.safe_load(recipe_path("quickstart").read_text())
    L.seed_everything(recipe["seed_everything"])
    data, model = ImageData(**{**recipe["data"], **settings}), ImageClassifier(**recipe["model"])
    watch = Watch(data.test_images.images[WATCHED])
    with TemporaryDirectory() as folder:
        logger = CSVLogger(folder, name="", version="")
        trainer = L.Trainer(
            max_epochs=epochs or recipe["trainer"]["max_epochs"],
            log_every_n_steps=47,  # a third of an epoch
            callbacks=[watch],
            logger=logger,
            enable_checkpointing=False,
        )
        trainer.fit(model, data)
        with Path(folder, "metrics.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        batches: Any = trainer.predict(model, data)
    return Run(data, rows, watch, torch.cat([batch["probabilities"] for batch in batches]).float())


# ---- Parts of pictures


def show(axes: Axes, image: Tensor, title: str = "", size: float = SMALL) -> None:
    """Draw uint8 (H, W, C) without axes. size: points of the title."""
    axes.imshow(image.numpy())
    axes.set_title(title, fontsize=size)
    axes.axis("off")


def plot_curves(axes: Axes, run: Run, name: str, title: str) -> None:
    """Draw the training and the validation curve of a value over epochs."""
    for part, label, colour in (("train", "training", BLUE), ("val", "validation", ORANGE)):
        axes.plot(*run.curve(f"{part}/{name}"), color=colour, label=label, marker="o", markersize=2.5, linewidth=1.4)
    axes.set_title(title, fontsize=SMALL + 1)
    axes.set_xlabel("epoch", fontsize=SMALL)
    axes.tick_params(labelsize=SMALL)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(0, 1.02 if name == "accuracy" else None)
    axes.legend(fontsize=SMALL, frameon=False)


def mistakes(run: Run, count: int) -> list[tuple[Tensor, str]]:
    """Return wrongly classified test images, the surest first, with their true and predicted classes."""
    images, names = run.data.test_images, run.data.classes
    probabilities, predicted = run.probabilities.max(1)
    wrong = (predicted != images.labels).nonzero()[:, 0]
    rows = wrong[probabilities[wrong].argsort(descending=True)][:count].tolist()
    return [
        (images.images[row], f"true {names[images.labels[row]]}\npredicted {names[predicted[row]]}") for row in rows
    ]


def save(figure: Figure, name: str) -> None:
    """Write a PNG of at most 256 colours."""
    path = FOLDER / name
    figure.savefig(path, dpi=115)
    plt.close(figure)
    Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


# ---- Pictures


def draw_first_run(run: Run) -> None:
    """README: training images, accuracy during the training, and mistakes."""
    figure = plt.figure(figsize=(WIDTH, 2.7), layout="constrained")
    parts: Any = figure.subfigures(1, 3, width_ratios=[1.15, 1.15, 1])
    left, middle, right = parts
    images = run.data.train_images.images[:30]
    for axes, image in zip(left.subplots(5, 6).flat, images, strict=True):
        show(axes, image)
    left.suptitle("18,000 drawn images", fontsize=SMALL + 1)
    plot_curves(middle.subplots(), run, "accuracy", "accuracy in four epochs")
    for axes, (image, caption) in zip(right.subplots(2, 3).flat, mistakes(run, 6), strict=True):
        show(axes, image, caption, SMALL - 2.5)
    right.suptitle("mistakes", fontsize=SMALL + 1)
    save(figure, "first-run.png")


def draw_classes(data: ImageData) -> None:
    """Three training images of each class."""
    figure, grid = plt.subplots(3, 10, figsize=(WIDTH, 2.9), layout="constrained")
    for label, name in enumerate(data.classes):
        rows = (data.train_images.labels == label).nonzero()[:3, 0].tolist()
        for line, row in enumerate(rows):
            show(grid[line, label], data.train_images.images[row], name if line == 0 else "")
    save(figure, "classes.png")


def draw_pixels(data: ImageData) -> None:
    """One image, its three channels, and some of its red values as numbers."""
    row = int((data.train_images.labels == data.classes.index("heart")).nonzero()[0])
    image = data.train_images.images[row]
    figure, axes = plt.subplots(1, 5, figsize=(WIDTH, 2.3), layout="constrained", width_ratios=[1, 1, 1, 1, 1.7])
    show(axes[0], image, "image, 32 × 32")
    for channel, (name, colours) in enumerate({"red": "Reds_r", "green": "Greens_r", "blue": "Blues_r"}.items()):
        axes[channel + 1].imshow(image[:, :, channel], cmap=colours, vmin=0, vmax=255)
        axes[channel + 1].set_title(name, fontsize=SMALL)
        axes[channel + 1].axis("off")
    corner = image[12:20, 12:20, 0].numpy()
    axes[4].imshow(corner, cmap="Reds_r", vmin=0, vmax=255)
    for (y, x), value in np.ndenumerate(corner):
        axes[4].text(
            x, y, str(value), ha="center", va="center", fontsize=5.5, color="black" if value > 110 else "white"
        )
    axes[4].set_title("64 of the red values", fontsize=SMALL)
    axes[4].axis("off")
    save(figure, "pixels.png")


def draw_augmentation() -> None:
    """Four images, and the same in six epochs with flip, crop and cutout."""
    data = ImageData("shapes", count=1000, shuffle=False, augment=Augment("random", 4, 8), mean=0.5)
    batches = []
    for epoch in range(6):
        order, make = data.train_loader.epoch_plan(epoch)
        (batch,) = make([(order[:4], 1.0)])
        batches.append(batch)
    figure, grid = plt.subplots(4, 7, figsize=(WIDTH * 0.75, 3.9), layout="constrained")
    for line, row in enumerate(batches[0].indices.tolist()):
        show(grid[line, 0], data.train_images.images[row], "original" if line == 0 else "")
        for epoch, batch in enumerate(batches):
            show(grid[line, epoch + 1], batch.images[line], f"epoch {epoch + 1}" if line == 0 else "")
    save(figure, "augmentation.png")


def draw_probabilities(run: Run) -> None:
    """The probabilities of one test image at four moments of the training."""
    image, label = run.data.test_images.images[WATCHED], int(run.data.test_images.labels[WATCHED])
    figure, axes = plt.subplots(1, 5, figsize=(WIDTH, 2.4), layout="constrained", width_ratios=[0.9, 1, 1, 1, 1])
    show(axes[0], image, f"label {label}: {run.data.classes[label]}")
    places = range(len(run.data.classes))
    for place, (axis, step) in enumerate(zip(axes[1:], WATCHED_STEPS, strict=True)):
        values = run.watch.probabilities[step]
        axis.barh(places, values, color=[ORANGE if place == label else GREY for place in places])
        axis.set_yticks(places, run.data.classes if place == 0 else [], fontsize=SMALL - 1)
        axis.set(xlim=(0, 1), ylim=(len(places) - 0.4, -0.6))
        axis.tick_params(axis="x", labelsize=SMALL - 1)
        axis.set_title(f"after {step} steps: loss {-np.log(values[label]):.2f}", fontsize=SMALL)
        axis.spines[["top", "right"]].set_visible(False)
    save(figure, "probabilities.png")


def draw_curves(runs: dict[str, Run], name: str) -> None:
    """Loss and accuracy of runs, a row for each."""
    figure, grid = plt.subplots(len(runs), 2, figsize=(WIDTH, 2.6 * len(runs)), layout="constrained", squeeze=False)
    for line, (title, run) in zip(grid, runs.items(), strict=True):
        plot_curves(line[0], run, "loss", f"{title}: loss")
        plot_curves(line[1], run, "accuracy", f"{title}: accuracy")
    save(figure, name)


def draw_confusion(run: Run) -> None:
    """The confusion matrix of the test images."""
    count, names = len(run.data.classes), run.data.classes
    predicted = run.probabilities.argmax(1)
    matrix = torch.bincount(run.data.test_images.labels * count + predicted, minlength=count**2).view(count, count)
    figure, axes = plt.subplots(figsize=(WIDTH * 0.62, 4.6), layout="constrained")
    axes.imshow(matrix.sqrt(), cmap="Blues")  # the root makes single images visible
    for (label, prediction), images in np.ndenumerate(matrix.numpy()):
        colour = "white" if images > 100 else "black"
        axes.text(prediction, label, str(images), ha="center", va="center", fontsize=SMALL, color=colour)
    axes.set_xticks(range(count), names, rotation=90, fontsize=SMALL)
    axes.set_yticks(range(count), names, fontsize=SMALL)
    axes.set_xlabel("predicted class", fontsize=SMALL + 1)
    axes.set_ylabel("true class", fontsize=SMALL + 1)
    save(figure, "confusion.png")


def draw_mistakes(run: Run) -> None:
    """The mistakes of which the net was surest."""
    figure, grid = plt.subplots(2, 8, figsize=(WIDTH, 2.9), layout="constrained")
    for axes, (image, caption) in zip(grid.flat, mistakes(run, 16), strict=True):
        show(axes, image, caption)
    save(figure, "mistakes.png")


# ---- Pictures of pages, from trainings in a temporary folder


class Programs:
    """A folder with trainings, and a browser to look at them.

    Args:
        folder: working folder of the programs.
        browser: Chromium. In it, pages have no scrollbars.
        data_dir: folder with CIFAR-10.
    """

    def __init__(self, folder: Path, browser: Browser, data_dir: Path) -> None:
        self.folder, self.browser, self.data_dir = folder, browser, data_dir
        self._output = ""

    def run(self, *words: str) -> str:
        """Return the output of a program. A failure shows its errors."""
        answer = subprocess.run(words, stdout=subprocess.PIPE, text=True, cwd=self.folder, env=_environment())
        if answer.returncode:
            raise SystemExit(f"{' '.join(words)} failed with exit code {answer.returncode}:\n{answer.stdout}")
        return answer.stdout

    def quickstart(self) -> str:
        """Train quickstart-1, -2 and -3 unless they exist. Return the output of the first."""
        if not self._output:
            command = (sys.executable, str(ROOT / "scripts" / "train.py"), "--recipe", "quickstart")
            outputs = [self.run(*command, *flags) for flags in RUNS]
            self._output = outputs[0]
        return self._output

    @contextmanager
    def service(self, *words: str) -> Iterator[str]:
        """Start a command that serves a page. Yield the line with its address."""
        command = [sys.executable, "-m", *words]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=self.folder, env=_environment()
        ) as process:
            assert process.stdout is not None
            try:
                yield next((line for line in process.stdout if "http://" in line), "")
            finally:
                process.terminate()
                process.communicate()  # a closed pipe would be an error of the program

    def page(self, width: int, height: int) -> Page:
        """Return a new window of the browser, in pixels."""
        return self.browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")


def _environment() -> dict[str, str]:
    return os.environ | {"COLUMNS": "96", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


def address_in(line: str) -> str:
    """Return the address in a line of output."""
    return next(word.rstrip(".,") for word in line.split() if word.startswith("http://"))


def save_page(pixels: bytes, path: Path) -> None:
    """Write a screenshot as a PNG of few colours."""
    picture = Image.open(BytesIO(pixels)).convert("RGB")
    picture.quantize(COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


def draw_terminal(programs: Programs) -> None:
    """What a training prints."""
    text = f"$ python scripts/train.py --recipe quickstart\n{programs.quickstart()}"
    page = programs.page(1200, 900)
    style = "margin: 0; padding: 16px 20px; width: max-content; color: #fff; background: #000"
    # With the font's own line height, the lines of boxes touch.
    page.set_content(f'<pre style="{style}; font: 15px DejaVu Sans Mono">{html.escape(text.strip())}</pre>')
    save_page(page.locator("pre").screenshot(), RESULTS / "terminal.png")


def draw_report(programs: Programs) -> None:
    """The summary and the first four curves of a report."""
    programs.quickstart()
    page = programs.page(1000, 1200)
    page.goto((programs.folder / "lightning_logs/quickstart-1/report.html").as_uri())
    box = page.locator("#curves figure").nth(3).bounding_box()
    assert box is not None
    area = {"x": 0, "y": 0, "width": 1000, "height": box["y"] + box["height"] + 10}
    save_page(page.screenshot(clip=area, full_page=True), RESULTS / "report.png")  # type: ignore[arg-type]


def draw_serve(programs: Programs) -> None:
    """The page of `serve` with a prediction."""
    programs.quickstart()
    data = ImageData("shapes", count=50, image_size=256)
    row = int((data.test_images.labels == data.classes.index("heart")).nonzero()[0])
    Image.fromarray(data.test_images.images[row].numpy()).save(programs.folder / "heart.png")
    with programs.service("cifar_lit", "serve", "lightning_logs/quickstart-1", "--port", "0") as line:
        page = programs.page(1000, 760)
        page.goto(address_in(line))
        page.set_input_files("input[type=file]", programs.folder / "heart.png")
        page.wait_for_selector("#answer:not([hidden])")
        page.wait_for_timeout(600)  # the animation of the bars
        save_page(page.screenshot(full_page=True), RESULTS / "serve.png")


@contextmanager
def tensorboard(programs: Programs) -> Iterator[str]:
    """Start TensorBoard. Yield its address."""
    programs.quickstart()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", "lightning_logs", "--port", str(port)]
    address = f"http://127.0.0.1:{port}/"
    with subprocess.Popen(
        [*command, "--host", "127.0.0.1"], cwd=programs.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            for _ in range(120):
                with suppress(OSError):
                    urlopen(f"{address}data/runs").close()
                    break
                time.sleep(0.5)
            yield address
        finally:
            process.terminate()


def draw_tensorboard(programs: Programs) -> None:
    """The curves of three runs."""
    with tensorboard(programs) as address:
        page = programs.page(1500, 780)
        page.goto(f"{address}?smoothing=0#scalars&_smoothingWeight=0&tagFilter=(train%7Cval)%2F(loss%7Caccuracy)%7Clr")
        page.get_by_text("val/loss").first.wait_for()
        page.wait_for_timeout(3000)  # curves are loaded and drawn one after another
        save_page(page.screenshot(), RESULTS / "tensorboard.png")


def draw_hparams(programs: Programs) -> None:
    """Settings and results of three runs in a table."""
    with tensorboard(programs) as address:
        page = programs.page(1700, 420)
        page.goto(f"{address}#hparams")
        page.get_by_text("test/accuracy").first.wait_for()
        page.wait_for_timeout(2000)
        save_page(page.screenshot(), RESULTS / "hparams.png")


def write_wrong_labels(root: Path, folder: Path) -> None:
    """Write images of CIFAR-10 into class folders, a part of them into that of the next class."""
    data = ImageData("cifar10", root=str(root), val_size=0)
    for name in data.classes:
        (folder / name).mkdir(parents=True)
    for label, name in enumerate(data.classes):
        rows = (data.train_images.labels == label).nonzero()[:REVIEWED, 0].tolist()
        for number, row in enumerate(rows):
            wrong = number % WRONG == WRONG - 1
            place = data.classes[(label + 1) % len(data.classes)] if wrong else name
            Image.fromarray(data.train_images.images[row].numpy()).save(folder / place / f"{row:05}.png")


def review_frames(page: Page) -> Iterator[bytes]:
    """Press the keys of a review, and yield a picture of the page after each."""
    for key in REVIEW_KEYS:
        if key:
            page.keyboard.press(key)
        if key == "/":
            page.keyboard.type("do")
        page.wait_for_selector("[aria-busy=false]")
        page.wait_for_timeout(300)
        yield page.screenshot()
    page.keyboard.press("Escape")
    page.select_option("#filter", index=1)
    page.evaluate("document.activeElement.blur()")
    while page.locator("#review").is_visible():
        page.keyboard.press("k")
        page.wait_for_timeout(100)
    page.get_by_role("button", name="Write").click()
    page.locator("#written", has_text="rows").wait_for()
    yield page.screenshot()


def draw_review(programs: Programs) -> None:
    """A review: three labels corrected, a class searched, the table written."""
    images = programs.folder / "photos"
    write_wrong_labels(programs.data_dir, images)
    train = ("train", "--recipe", "finetune", "--data-dir", "photos", "--folds", "5")
    fast = ("--data.image_size", "128", "--finetune.unfreeze", "false")
    programs.run(sys.executable, "-m", "cifar_lit", *train, *fast)
    words = ("cifar_lit", "review", "lightning_logs/finetune-folds-1", "--port", "0", "--limit", "100")
    with programs.service(*words) as line:
        page = programs.page(*REVIEW_WINDOW)
        page.goto(address_in(line))
        page.wait_for_selector("#review:not([hidden])")
        frames = [Image.open(BytesIO(pixels)).convert("RGB") for pixels in review_frames(page)]
    width, height = FRAME_WIDTH, round(REVIEW_WINDOW[1] * FRAME_WIDTH / REVIEW_WINDOW[0])
    rows = -(-len(frames) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * (width + GAP) + GAP, rows * (height + GAP) + GAP), "#8a93a6")
    for number, frame in enumerate(frames):
        row, column = divmod(number, COLUMNS)
        small = frame.resize((width, height), Image.Resampling.LANCZOS)
        sheet.paste(small, (column * (width + GAP) + GAP, row * (height + GAP) + GAP))
    pixels = BytesIO()
    sheet.save(pixels, "PNG")
    save_page(pixels.getvalue(), FOLDER / "review.png")


def draw_drawn() -> None:
    """The pictures of README.md and docs/first-steps.md."""
    run = train()
    few = train(epochs=MANY_EPOCHS, count=FEW_IMAGES)
    draw_first_run(run)
    draw_classes(run.data)
    draw_pixels(run.data)
    draw_augmentation()
    draw_probabilities(run)
    draw_curves({"quickstart": run, f"{FEW_IMAGES} images, {MANY_EPOCHS} epochs": few}, "curves.png")
    draw_confusion(run)
    draw_mistakes(run)


PAGES = {
    "terminal": draw_terminal,
    "report": draw_report,
    "serve": draw_serve,
    "tensorboard": draw_tensorboard,
    "hparams": draw_hparams,
    "review": draw_review,
}


def main() -> None:
    """Draw the pictures that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"drawn, {', '.join(PAGES)}; all without a name")
    parser.add_argument("--data-dir", type=Path, default=ROOT / "data", help="folder with CIFAR-10, for review")
    options = parser.parse_args()
    names = options.names or ["drawn", *PAGES]
    if unknown := set(names) - {"drawn", *PAGES}:
        parser.error(f"no picture is called {', '.join(sorted(unknown))}: use drawn, {', '.join(PAGES)}")
    if "drawn" in names:
        draw_drawn()
    pages = [name for name in PAGES if name in names]
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    flags = ["--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        programs = Programs(Path(folder), browser, options.data_dir.absolute())
        for name in pages:
            PAGES[name](programs)
        browser.close()


if __name__ == "__main__":
    main()
