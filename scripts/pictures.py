"""Draw the pictures of README.md, docs/ and results/: `python scripts/pictures.py [NAME …]`.

It trains the quickstart recipe with four settings in a temporary folder, on the CPU. Pages are opened in Chromium,
driven by playwright.
"""

from __future__ import annotations

import argparse
import atexit
import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import numpy as np
import torch
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor, to_pil_image
from torchvision.utils import make_grid

from cifar_lit import ImageData
from cifar_lit.cli.flags import recipe_path
from cifar_lit.data.augment import Augment
from cifar_lit.data.loaders import in_order
from cifar_lit.data.settings import Images
from cifar_lit.run.loggers import augmented_sample
from cifar_lit.runs.figures import as_pixels, confusion_matrix

ROOT = Path(__file__).parent.parent
DOCS, RESULTS = ROOT / "docs" / "pictures", ROOT / "results" / "pictures"
RUNS = Path("lightning_logs")  # in a temporary working folder
BLUE, ORANGE = "#0072B2", "#D55E00"
CPU = ("cpu90", "cpu91", "cpu92")
WIDTH, DPI = 8.4, 115  # inches, pixels per inch
STYLE = {
    **{"font.size": 8, "axes.titlesize": 8, "figure.dpi": DPI, "figure.constrained_layout.use": True},
    **{"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "grid.alpha": 0.3},
}
LOGGED = ("--precision", "32-true", "--trainer.log_every_n_steps", "47")  # a third of an epoch
SETTINGS = ((), ("--lr", "0.005"), ("--net", "lenet"), ("--data.count", "600", "--epochs", "40"))  # for quickstart-1, …


@cache
def quickstart() -> list[str]:
    """Train the quickstart recipe with each of SETTINGS; return the outputs."""
    train = (sys.executable, str(ROOT / "scripts" / "train.py"), "--recipe", "quickstart", *LOGGED)
    return [subprocess.check_output([*train, *flags], text=True) for flags in SETTINGS]


@cache
def images() -> ImageData:
    """Return the images of the quickstart recipe."""
    return ImageData(**yaml.safe_load(recipe_path("quickstart").read_text(encoding="utf-8"))["data"])


def probabilities() -> Tensor:
    """Return the test probabilities (N, classes) of the first run."""
    quickstart()
    return torch.from_numpy(np.load(RUNS / "quickstart-1" / "probabilities.npy")).float()


# ---- Drawn pictures


def show(axes: Axes, image: Tensor, title: str) -> None:
    """Draw uint8 (H, W, 3) without axes."""
    axes.imshow(image.numpy())
    axes.set_title(title)
    axes.axis("off")


def plot_curves(axes: Axes, number: int, name: str) -> None:
    """Draw the training and the validation curve of a value of quickstart-NUMBER over epochs."""
    quickstart()
    with (RUNS / f"quickstart-{number}" / "metrics.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    length = next(int(row["step"]) for row in rows if row["val/loss"])  # steps of an epoch
    for part, label, colour in (("train", "training", BLUE), ("val", "validation", ORANGE)):
        points = [(int(row["step"]) / length, float(row[f"{part}/{name}"])) for row in rows if row[f"{part}/{name}"]]
        axes.plot(*zip(*points, strict=True), color=colour, label=label, marker="o", markersize=2.5)
    axes.set(title=name, xlabel="epoch", ylim=(0, 1.02 if name == "accuracy" else None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid()
    axes.legend()


def mistakes(count: int, columns: int) -> Tensor:
    """Return a gallery, uint8 (3, H, W), of wrongly classified test images, the surest first."""
    test, names = images().test_images, images().classes
    highest, predicted = probabilities().max(1)
    wrong = (predicted != test.labels).nonzero()[:, 0]
    rows = wrong[highest[wrong].argsort(descending=True)][:count]
    captions = [(f"true {names[test.labels[row]]}", f"predicted {names[predicted[row]]}") for row in rows]
    return gallery(test.images[rows], captions, columns)


def gallery(images: Tensor, captions: Sequence[tuple[str, ...]], columns: int) -> Tensor:
    """Return a grid of images, uint8 (N, H, W, C), with captions, as uint8 (3, H, W)."""
    rows = -(-len(images) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(1.2 * columns, 1.5 * rows))
    for axes, image, lines in zip(grid.flat, images, captions, strict=True):
        show(axes, image, "\n".join(lines))
    return pixels_of(figure)


def pixels_of(figure: Figure) -> Tensor:
    """Return a figure as uint8 (3, H, W), and close it."""
    file = BytesIO()
    figure.savefig(file)
    plt.close(figure)
    return pil_to_tensor(Image.open(file).convert("RGB"))


def save(picture: Tensor | bytes, path: Path) -> None:
    """Write a picture, uint8 (3, H, W) or the bytes of a file, as a PNG with at most 200 colours."""
    image = to_pil_image(picture) if isinstance(picture, Tensor) else Image.open(BytesIO(picture)).convert("RGB")
    image.quantize(200, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


def draw_first_run() -> None:
    """README: training images, accuracy during the training, and mistakes."""
    sample = make_grid(images().train_images.images[:48].permute(0, 3, 1, 2), nrow=6, pad_value=255)
    right = mistakes(6, columns=3)
    height = right.shape[1]
    figure, axes = plt.subplots(figsize=(3.4, height / DPI))
    plot_curves(axes, 1, "accuracy")
    left = torch.nn.functional.pad(sample, (0, 0, 0, height - sample.shape[1]), value=255)
    save(torch.cat((left, pixels_of(figure), right), dim=2), DOCS / "first-run.png")


def draw_classes() -> None:
    """Three training images of each class."""
    train, names = images().train_images, images().classes
    rows = torch.stack([(train.labels == label).nonzero()[:3, 0] for label in range(len(names))], dim=1).flatten()
    save(gallery(train.images[rows], [(name,) for name in 3 * names], len(names)), DOCS / "classes.png")


def draw_pixels() -> None:
    """One image, its three channels from black (0) to full colour (255), and some of its red values as numbers."""
    row = int((images().train_images.labels == images().classes.index("heart")).nonzero()[0])
    image = images().train_images.images[row]
    figure, axes = plt.subplots(1, 5, figsize=(WIDTH, 2.3), width_ratios=[1, 1, 1, 1, 1.7])
    channels = image[:, :, None] * torch.eye(3, dtype=torch.uint8)  # (H, W, 3, 3): each is 0 but in one channel
    corner = channels[12:20, 12:20, 0]
    panels = (image, *channels.unbind(2), corner)
    titles = ("image, 32 × 32", "red", "green", "blue", "64 of the red values")
    for axis, panel, title in zip(axes, panels, titles, strict=True):
        show(axis, panel, title)
    for (y, x), value in np.ndenumerate(corner[:, :, 0].numpy()):
        axes[4].text(x, y, str(value), ha="center", va="center", fontsize=5.5, color="white")
    save(pixels_of(figure), DOCS / "pixels.png")


def draw_augmentation() -> None:
    """Four images, and the same in six epochs with flip, crop and cutout."""
    moves = Augment(crop=4, flip="random", cutout=8)
    data = ImageData("shapes", images=Images(count=1000, mean=0.5), augment=moves)
    data.train_loader.order = in_order
    originals = data.train_images.images[data.split[0][:4]]
    variants = [augmented_sample(data, 4, epoch).permute(0, 2, 3, 1) for epoch in range(6)]
    captions = [("original",), *((f"epoch {epoch}",) for epoch in range(1, 7))]
    save(gallery(torch.stack((originals, *variants), dim=1).flatten(0, 1), 4 * captions, 7), DOCS / "augmentation.png")


def draw_curves() -> None:
    """Loss and accuracy of a healthy training, and of one on few images."""
    figure, grid = plt.subplots(2, 2, figsize=(WIDTH, 5.2))
    for line, number, title in ((grid[0], 1, "quickstart"), (grid[1], 4, "600 images, 40 epochs")):
        line[0].set_ylabel(title)
        plot_curves(line[0], number, "loss")
        plot_curves(line[1], number, "accuracy")
    save(pixels_of(figure), DOCS / "curves.png")


def draw_confusion() -> None:
    """The confusion matrix of the test images."""
    count = len(images().classes)
    pairs = images().test_images.labels * count + probabilities().argmax(1)
    matrix = torch.bincount(pairs, minlength=count**2).view(count, count)
    save(as_pixels(confusion_matrix(matrix, images().classes)), DOCS / "confusion.png")


def draw_mistakes() -> None:
    """The mistakes of which the net was surest."""
    save(mistakes(16, columns=8), DOCS / "mistakes.png")


def draw_cpu_record() -> None:
    """Mean accuracy of the cpu recipes by their typical training time."""
    files = {name: ROOT / "results" / "cpu" / f"{name}.json" for name in ("units-cpu", *map("recipe-{}".format, CPU))}
    measured = {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items()}
    figure, axes = plt.subplots(figsize=(5.6, 3))
    minutes = [measured["units-cpu"]["headline"][f"{name}: typical training"]["median"] / 60 for name in CPU]
    runs = [measured[f"recipe-{name}"]["recipes"][name]["runs"] for name in CPU]
    plain = [100 * np.mean([run["accuracy"] for run in same]) for same in runs]
    views = [100 * np.mean([run["views"]["accuracy"] for run in same]) for same in runs]
    for scores, colour, label in ((views, ORANGE, "with test-time augmentation"), (plain, BLUE, "test accuracy")):
        axes.plot(minutes, scores, "o-", color=colour, label=label)
    for name, place in zip(CPU, zip(minutes, plain, strict=True), strict=True):
        axes.annotate(name, place, xytext=(6, -10), textcoords="offset points")
    axes.set(title="CIFAR-10 on two CPU cores", xlabel="minutes of training", ylabel="% of the test images correct")
    axes.set(xlim=(0, 3.5), ylim=(89, 94))
    axes.grid()
    axes.legend(loc="upper left")
    save(pixels_of(figure), RESULTS / "cpu-record.png")


# ---- Pictures of pages


@contextmanager
def service(*words: str) -> Iterator[str]:
    """Run `python -m WORDS`, which serves a page; yield the address that it prints."""
    command = [sys.executable, "-m", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            yield next(found[0].rstrip(".,") for line in process.stdout if (found := re.search(r"http://\S+", line)))
        finally:
            process.terminate()
            process.communicate()  # the program would fail if its pipe were closed


@cache
def browser() -> Browser:
    """Start Chromium, without scrollbars."""
    playwright = sync_playwright().start()
    atexit.register(playwright.stop)
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    flags = ["--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    return playwright.chromium.launch(executable_path=chromium, args=flags)


def window(width: int, height: int, address: str) -> Page:
    """Open a page in a new window of this size in pixels."""
    page = browser().new_page(viewport={"width": width, "height": height}, color_scheme="light")
    page.goto(address)
    return page


def draw_report() -> None:
    """The summary and the first four curves of a report."""
    quickstart()
    page = window(1000, 1363, (RUNS / "quickstart-1" / "report.html").absolute().as_uri())
    save(page.screenshot(), RESULTS / "report.png")


def draw_serve() -> None:
    """The page of `serve` with a prediction."""
    quickstart()
    data = ImageData("shapes", images=Images(count=50, image_size=256))
    row = int((data.test_images.labels == data.classes.index("heart")).nonzero()[0])
    Image.fromarray(data.test_images.images[row].numpy()).save("heart.png")
    with service("cifar_lit", "serve", str(RUNS / "quickstart-1"), "--port", "0") as address:
        page = window(1000, 760, address)
        page.set_input_files("input[type=file]", "heart.png")
        page.wait_for_selector("#answer:not([hidden])")
        page.wait_for_timeout(600)  # the animation of the bars
        save(page.screenshot(full_page=True), RESULTS / "serve.png")


def draw_tensorboard() -> None:
    """The curves of the runs."""
    quickstart()
    curves = "?smoothing=0#scalars&_smoothingWeight=0&tagFilter=(train%7Cval)%2F(loss%7Caccuracy)%7Clr"
    with service("tensorboard.main", "--logdir", str(RUNS), "--host", "127.0.0.1", "--port", "0") as address:
        page = window(1500, 780, address + curves)
        page.get_by_text("val/loss").first.wait_for()
        page.wait_for_timeout(3000)  # curves are loaded and drawn one after another
        save(page.screenshot(), RESULTS / "tensorboard.png")


def draw_review() -> None:
    """A wrong label to review: the image, its suggested class, and similar training images."""
    names, labels = images().classes, images().train_images.labels.tolist()
    wrong = [name + (row % 50 == 0) for row, name in enumerate(labels)]
    rows = [f"{row},{names[label % len(names)]}" for row, label in enumerate(wrong)]
    Path("labels.csv").write_text("\n".join(["image,label", *rows, ""]), encoding="utf-8")
    train = (sys.executable, str(ROOT / "scripts" / "train.py"), "--recipe", "quickstart", "--folds", "2")
    subprocess.check_call([*train, "--data.labels", "labels.csv"], stdout=subprocess.DEVNULL)
    with service("cifar_lit", "review", str(RUNS / "quickstart-folds-1"), "--port", "0") as address:
        page = window(900, 850, address)
        page.wait_for_selector("#review:not([hidden])")
        page.wait_for_selector("[aria-busy=false]")
        save(page.screenshot(), DOCS / "review.png")


PICTURES = {
    **{"first-run": draw_first_run, "classes": draw_classes, "pixels": draw_pixels, "augmentation": draw_augmentation},
    **{"curves": draw_curves, "confusion": draw_confusion, "mistakes": draw_mistakes},
    **{"report": draw_report, "serve": draw_serve, "tensorboard": draw_tensorboard, "review": draw_review},
    "cpu-record": draw_cpu_record,
}


def main() -> None:
    """Draw the pictures that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all, {', '.join(PICTURES)}")
    names = parser.parse_args().names or list(PICTURES)
    for name in names:
        if name not in PICTURES:
            parser.error(f"there is no picture {name!r}: choose from {', '.join(PICTURES)}")
    plt.style.use(STYLE)
    os.environ |= {"COLUMNS": "96", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        for name in names:
            PICTURES[name]()


if __name__ == "__main__":
    main()
