"""Training time of recipes in units, the tutorial's ten epochs: python scripts/benchmarks/units.py cpu91."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import suppress
from statistics import fmean
from typing import Any

import torch
from loops import ArrayImages
from PIL import Image
from progress import Progress
from report import Row, publish, spread
from script import run_script
from timed_fit import Stopwatch, build, fit, subject_from
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision.transforms import ToTensor

from cifar_lit.base.config_file import plain_values
from cifar_lit.base.errors import UsageError
from cifar_lit.base.hardware import choose_precision, detect_machine
from cifar_lit.cli.flags import recipe_path
from cifar_lit.data.loaders import count_batches
from cifar_lit.features.resolutions import Resolutions
from cifar_lit.training.orderly_stop import Interrupted

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.add_argument("names", nargs="+", metavar="NAME", help="packaged recipes, or YAML files")
    parser.add_argument("--data-dir", dest="root", metavar="PATH", help="folder of CIFAR-10's archive")
    parser.add_argument("--dataset", default="cifar10", help="shapes for a trial run")
    parser.add_argument("--rounds", type=int, default=8, help="timed rounds")
    precision = choose_precision(detect_machine(), "cpu")[0]
    parser.add_argument("--precision", default=precision, help="of the recipes, such as 32-true")


def run(settings: argparse.Namespace) -> None:
    """Measure and report."""
    if settings.rounds < 1:
        raise UsageError("--rounds must be at least 1")
    tutorial = tutorial_seconds(settings.dataset, settings.root)
    units: list[float] = []
    trainings: dict[str, list[float]] = {recipe_path(name).stem: [] for name in settings.names}
    progress = Progress(settings.rounds, "round")
    with suppress(Interrupted):
        for number in range(settings.rounds):
            units.append(next(tutorial))
            for name, seconds in zip(settings.names, trainings.values(), strict=True):
                seconds.append(training_seconds(name, settings))
            progress.advance(number + 1)
    rows: list[Row] = [(UNIT, spread(units), "s")]
    for name, seconds in trainings.items():
        if seconds:
            rows.append((f"{name}: training", spread(seconds), "s"))
            ratios = [one / unit for one, unit in zip(seconds, units, strict=False)]
            rows.append((f"{name}: units", spread(ratios), "×"))
            rows.append((f"{name}: typical training", spread(TYPICAL_UNIT * ratio for ratio in ratios), "s"))
    publish("units", {**vars(settings), "recipes": [*trainings]}, settings.dataset, rows)


def tutorial_seconds(dataset: str, root: str | None) -> Iterator[float]:
    """Yield the seconds of a unit, from some batches of the tutorial's loop."""
    recipe: dict[str, Any] = plain_values(recipe_path("tudui"))
    data, model = build(recipe["model"], {**recipe["data"], "dataset": dataset, "root": root, "val_size": 0})
    size, net = data.batch_size, model.net
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
    total = 0.0
    for side in dict.fromkeys(of_epochs):
        flags = argparse.Namespace(
            recipe=name, net=None, lr=None, batch_size=None, precision=settings.precision,
            dataset=settings.dataset, root=settings.root, count=10_000, accelerator="cpu",
        )  # fmt: skip
        subject = subject_from(flags)
        features = {key: values for key, values in subject.features.items() if key not in ("resolutions", "skip_easy")}
        if side:
            features["resolutions"] = {"sides": {side: 1.0}}
        watch = Stopwatch(STEPS, 1, WARM_UP, lambda trainer, model: lambda steps: None)
        fit(subject._replace(features=features), watch)
        steps = count_batches(len(subject.data.split[0]), subject.data.batch_size)
        total += of_epochs.count(side) * steps * fmean(turn.ours for turn in watch.rounds) / STEPS
    return total


if __name__ == "__main__":
    raise SystemExit(run_script())
