"""Draw the pictures of README.md and docs/first-steps.md: `python scripts/pictures.py`.

Trains the quickstart recipe, once as it is and once on few images (about two minutes on two CPU cores), and writes PNG
files to docs/pictures. Nothing is downloaded.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

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
from torch import Tensor

from cifar_lit import ImageClassifier, ImageData
from cifar_lit.cli.flags import recipe_path

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#999999"
WIDTH = 8.4  # inches
SMALL = 8  # points
WATCHED = 28  # a test image
WATCHED_STEPS = (0, 141, 282, 564)  # untrained, and after epochs 1, 2 and 4
FEW_IMAGES, MANY_EPOCHS = 600, 40


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
        with Path(folder, "metrics.csv").open() as file:
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
    data = ImageData("shapes", count=1000, shuffle=False, crop=4, flip="random", cutout=8, mean=0.5)
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


def main() -> None:
    """Train, and draw all pictures."""
    FOLDER.mkdir(exist_ok=True)
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


if __name__ == "__main__":
    main()
