"""Training time of recipes in units, the tutorial's ten epochs: python scripts/benchmarks/units.py cpu91."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from loops import ArrayImages
from PIL import Image
from report import Row, publish, spread
from timed_fit import timed
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision.transforms import ToTensor

from cifar_lit.base.hardware import choose_precision, detect_machine
from cifar_lit.base.settings import plain_values
from cifar_lit.base.text import note
from cifar_lit.cli.flags import recipe_path
from cifar_lit.data.datamodule import ImageData
from cifar_lit.features.resolutions import Resolutions
from cifar_lit.models.registry import build_net

WHAT = (
    "Measure the training time of recipes on this machine's CPU, in units. A unit is ten epochs of the tutorial's "
    "hand-written loop (batch size 64, float32, each epoch with its test). In each round, some batches of the "
    "tutorial and some steps of every recipe, at each of its image sizes, take turns, so that other load on the "
    "machine affects all of them. Times of whole epochs follow from their numbers of batches. The typical training "
    "time is that of a machine with a certain time of a unit."
)
EPOCHS = 10  # the tutorial trains for ten
BATCHES = 100  # training batches of the tutorial in a round, with a fifth as many test batches
WARM_UP, STEPS = 2, 5  # steps at each image size in a round
UNIT = "unit: ten epochs of the tutorial with their tests"
TYPICAL_UNIT = 220.3  # seconds on two cores of an AMD EPYC (results/cpu/budget.json), for times that can be compared


def run(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=WHAT)
    parser.add_argument("names", nargs="+", metavar="NAME", help="packaged recipes, or YAML files")
    parser.add_argument("--data-dir", dest="root", metavar="PATH", help="folder of CIFAR-10's archive")
    parser.add_argument("--dataset", default="cifar10", help="shapes for a trial run")
    parser.add_argument("--rounds", type=int, default=8, help="timed rounds")
    precision = choose_precision(detect_machine(), "cpu")[0]
    parser.add_argument("--precision", default=precision, help="of the recipes, such as 32-true")
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    settings = parser.parse_args(argv)
    tutorial = tutorial_seconds(settings.dataset, settings.root)
    units: list[float] = []
    trainings: dict[str, list[float]] = {recipe_path(name).stem: [] for name in settings.names}
    for number in range(settings.rounds):
        units.append(next(tutorial))
        for name, seconds in zip(settings.names, trainings.values(), strict=True):
            seconds.append(training_seconds(name, settings))
        note(f"round {number + 1} of {settings.rounds}")
    rows: list[Row] = [(UNIT, spread(units), "s")]
    for name, seconds in trainings.items():
        ratios = [one / unit for one, unit in zip(seconds, units, strict=True)]
        rows.append((f"{name}: training", spread(seconds), "s"))
        rows.append((f"{name}: units", spread(ratios), "×"))
        rows.append((f"{name}: typical training", spread(TYPICAL_UNIT * ratio for ratio in ratios), "s"))
    publish("units", {**vars(settings), "recipes": [*trainings]}, rows)


def tutorial_seconds(dataset: str, root: str | None) -> Iterator[float]:
    """Yield the seconds of a unit, from some batches of the tutorial's loop."""
    recipe: dict[str, Any] = plain_values(recipe_path("tudui"))
    data = ImageData(**{**recipe["data"], "dataset": dataset, "root": root, "val_size": 0})
    channels, height, width = data.input_shape
    net = build_net(recipe["model"]["net"], num_classes=data.class_count, channels=channels, image_size=(height, width))
    size = data.batch_size
    for parameter in net.parameters():  # our layout of the weights is faster
        parameter.data = parameter.data.contiguous()
    transforms = [Image.fromarray, ToTensor()]
    train = DataLoader(ArrayImages(data.train_images, transforms), batch_size=size, shuffle=True)
    test = DataLoader(ArrayImages(data.test_images, transforms), batch_size=size)
    optimizer = torch.optim.SGD(net.parameters(), lr=recipe["model"]["lr"])

    def train_on(pixels: torch.Tensor, labels: torch.Tensor) -> None:
        loss = F.cross_entropy(net(pixels), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def test_on(pixels: torch.Tensor, labels: torch.Tensor) -> None:
        outputs = net(pixels)
        F.cross_entropy(outputs, labels).item()
        (outputs.argmax(1) == labels).sum().item()

    while True:
        seconds = 0.0
        for loader, use, count in ((train, train_on, BATCHES), (test, test_on, BATCHES // 5)):
            before = time.perf_counter()
            done = 0
            for pixels, labels in loader:
                use(pixels, labels)
                done += 1
                if done == count:
                    break
            seconds += (time.perf_counter() - before) / done * len(loader)
        yield EPOCHS * seconds


def training_seconds(name: str, settings: argparse.Namespace) -> float:
    """Return the seconds of all steps of a recipe, from a few steps at each of its image sizes."""
    recipe: dict[str, Any] = plain_values(recipe_path(name))
    epochs = recipe["trainer"]["max_epochs"]
    resolutions = Resolutions((recipe.get("resolutions") or {}).get("sides", {}))
    of_epochs = [resolutions.side(epoch, epochs) for epoch in range(epochs)]
    words = ["--recipe", name, "--accelerator", "cpu", "--precision", settings.precision, "--skip_easy", "false"]
    words += ["--dataset", settings.dataset]
    if settings.root:
        words += ["--data-dir", settings.root]
    total = 0.0
    for side in dict.fromkeys(of_epochs):
        at_side = ["--resolutions", "false"]
        if side:
            at_side = [f"--resolutions.sides={{{side}: 1.0}}"]
        watch = timed([*words, *at_side], "timed_fit.Stopwatch", STEPS, 1, WARM_UP)
        total += of_epochs.count(side) * watch.steps_per_epoch * watch.rounds[0].ours / STEPS
    return total


if __name__ == "__main__":
    run()
