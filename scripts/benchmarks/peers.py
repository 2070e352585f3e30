"""Compare a recipe with common alternatives at equal training time: python scripts/benchmarks/peers.py."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, repeat
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.multiprocessing as mp
from curves import accuracy_of, plot, undisturbed
from lightning.pytorch.callbacks import Callback
from loops import ArrayImages, TutorialLoop, lay_out_plainly, leave_signals
from PIL import Image
from script import run_script
from timed_fit import Subject, build, fit
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision.models import resnet18
from torchvision.transforms import Normalize, RandomCrop, RandomHorizontalFlip, ToTensor

from cifar_lit.bench.progress import Progress
from cifar_lit.bench.report import Row, make_parent, publish, spread
from cifar_lit.cli.flags import recipe_path, recipe_settings
from cifar_lit.cli.quiet import quieten
from cifar_lit.data.datamodule import ImageData
from cifar_lit.errors import Failure, UsageError
from cifar_lit.hardware import choose_precision, detect_machine
from cifar_lit.text import note
from cifar_lit.training.orderly_stop import Interrupted

WHAT = (
    "Train one of our recipes, the tutorial's loop, a plain PyTorch ResNet-18 and, if timm is installed, a plain timm"
    " training on the CPU. Each has its own process; they take turns of some seconds until each has trained for the "
    "same time. After each turn the net is tested with the clock stopped, on 2,000 test images, and at the end on "
    "all. The recipe ends with its epochs. The learning rates of ResNet-18 and timm decay to 0 over the time. All "
    "train on all training images; nothing is selected by a test."
)
MEAN, STD = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]
PART = 2000  # images of an intermediate test; testing a ResNet on all of them takes longer than its turn


class Turns:
    """Clock of a training. After each turn it stops, tests the net, and waits for the next turn."""

    def __init__(self, connection: Connection, turns: int, accuracy: Callable[[int], float]) -> None:
        self._connection, self._left, self._accuracy, self._spent = connection, turns, accuracy, 0.0
        connection.send("ready")
        self._wait()

    def _wait(self) -> None:
        self._turn: float = self._connection.recv()
        self._begun = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Training time so far."""
        return self._spent + time.perf_counter() - self._begun

    def step(self, last: bool = False) -> None:
        """Call after each training step; `last` marks the end of the training."""
        seconds = self.seconds
        if seconds - self._spent >= self._turn or last:
            self._spent, self._left = seconds, self._left - 1
            last = last or not self._left
            self._connection.send((seconds, self._accuracy(sys.maxsize if last else PART), last))
            self._wait()


Start = Callable[[Callable[[int], float]], Turns]  # takes a function that tests the net on a number of images


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.add_argument("--recipe", default="laptop", help="our recipe")
    parser.add_argument("--data-dir", dest="root", metavar="PATH", help="folder of CIFAR-10's archive")
    parser.add_argument("--dataset", default="cifar10", help="shapes for a trial run")
    parser.add_argument("--seconds", type=float, default=25.0, help="training time of each, such as the recipe's own")
    parser.add_argument("--turns", type=int, default=10, help="number of turns")
    parser.add_argument("--seed", type=int, default=0, help="seed of all trainings")
    parser.add_argument("--plot", metavar="FILE.png", help="plot accuracy over seconds")


def run(settings: argparse.Namespace) -> None:
    """Measure and report."""
    if settings.seconds <= 0 or settings.turns < 1:
        raise UsageError("--seconds must be more than 0, and --turns at least 1")
    if settings.plot:
        make_parent(Path(settings.plot))
    peers: dict[str, Callable[..., None]] = {settings.recipe: ours, "tutorial": tutorial, "ResNet-18": plain_resnet}
    if find_spec("timm"):
        peers["timm"] = timm_resnet
    else:
        note("timm is not installed, so its training is left out: pip install timm")
    spawn, connections, lost = mp.get_context("spawn"), {}, ""
    curves: dict[str, list[tuple[int, float, float]]] = {name: [] for name in peers}  # turn, seconds, accuracy
    try:
        with suppress(Interrupted):
            for name, train in peers.items():
                connections[name], other = spawn.Pipe()
                spawn.Process(target=serve, args=(other, train, settings, torch.get_num_threads())).start()
                other.close()
            for name in connections:
                connections[name].recv()
            progress = Progress(len(peers) * settings.turns, "turn")
            plan = f"{settings.seconds:g} s for each of {', '.join(peers)}, and their tests"
            progress.announce(len(peers) * settings.seconds, plan)
            for number in range(settings.turns):
                for place, (name, connection) in enumerate(list(connections.items())):
                    connection.send(settings.seconds / settings.turns)
                    seconds, accuracy, last = connection.recv()
                    curves[name].append((number, seconds, accuracy))
                    progress.advance(number * len(peers) + place + 1, f"{name} {100 * accuracy:.1f} %")
                    if last:
                        del connections[name]
    except (EOFError, OSError):
        lost = f"the process of {name} failed: see its output"
    finally:
        for connection in connections.values():  # ends the waiting processes and their loader workers
            connection.close()
        for process in mp.active_children():
            process.join(1.0)
            process.kill()
            process.join()
    curves = {name: curve for name, curve in curves.items() if curve}
    rows: list[Row] = [(name, spread([100 * curve[-1][2]]), "%") for name, curve in curves.items()]
    rows += [(f"{name}, training", spread([curve[-1][1]]), "s") for name, curve in curves.items()]
    if rows:
        recipes = {
            name: {"accelerator": "cpu", "passes": [], "runs": [{"curve": curve}]} for name, curve in curves.items()
        }
        figures = publish("peers", vars(settings), f"{settings.dataset}, seed {settings.seed}", rows, recipes=recipes)
        if settings.plot:
            plot(figures, Path(settings.plot))
    if lost:
        raise Failure(lost)


def serve(connection: Connection, train: Callable[..., None], settings: argparse.Namespace, threads: int) -> None:
    """Run one training in its own process."""
    quieten()
    leave_signals(0)
    torch.set_num_threads(threads)
    torch.manual_seed(settings.seed)
    with suppress(EOFError, BrokenPipeError):  # the measurement is over
        train(settings, partial(Turns, connection, settings.turns))


# ---- the trainings: each builds net and data, starts its turns, and reports every step


class TurnsCallback(Callback):
    """Report the steps of a training under the Trainer."""

    def __init__(self, start: Start) -> None:
        self._start = start

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the turns when model and data are in place."""
        batches, self._steps = list(trainer.datamodule.test_dataloader()), trainer.estimated_stepping_batches  # type: ignore[attr-defined]

        def accuracy(images: int) -> float:
            with undisturbed(trainer, pl_module):
                return accuracy_of(trainer, pl_module, batches[: max(1, images // len(batches[0].labels))])

        self._turns = self._start(accuracy)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        """Report the step."""
        self._turns.step(trainer.global_step == self._steps)


def ours(settings: argparse.Namespace, start: Start) -> None:
    """Train a recipe under the Trainer with all features of a run."""
    recipe: dict[str, Any] = recipe_settings(recipe_path(settings.recipe))
    own = {"dataset": settings.dataset, "root": settings.root, "val_size": 0, "seed": settings.seed}
    images, model = build(recipe["model"], {**recipe["data"], **own})
    precision = recipe["trainer"].get("precision") or choose_precision(detect_machine(), "cpu")[0]
    subject = Subject(model, images, {"accelerator": "cpu", "devices": 1, "precision": precision})
    fit(subject, TurnsCallback(start), max_epochs=recipe["trainer"]["max_epochs"])


def tester(net: nn.Module, data: ImageData) -> Callable[[int], float]:
    """Return a function that tests a net on a number of test images."""

    def accuracy(images: int) -> float:
        pixels, labels = data.test_images.images[:images], data.test_images.labels[:images]
        net.eval()
        with torch.no_grad():
            parts = (Normalize(*data.statistics)(part.permute(0, 3, 1, 2) / 255) for part in pixels.split(500))
            guesses = torch.cat([net(part).argmax(1) for part in parts])
        net.train()
        return float((guesses == labels).float().mean())

    return accuracy


def tutorial(settings: argparse.Namespace, start: Start) -> None:
    """Run the tutorial's loop with net, learning rate and batch size of the recipe `tudui`."""
    recipe: dict[str, Any] = recipe_settings(recipe_path("tudui"))
    own = {"dataset": settings.dataset, "root": settings.root, "val_size": 0}
    data, model = build(recipe["model"], {**recipe["data"], **own})
    lay_out_plainly(model.net)
    torch.manual_seed(settings.seed)  # seed of the order; `build` seeds the net
    loop = TutorialLoop(data.train_images, data.split, model.net, data.batch_size, recipe["model"]["lr"])
    turns = start(tester(model.net, data))
    for _ in loop.steps(torch.device("cpu")):
        turns.step()


def train_plainly(
    settings: argparse.Namespace, start: Start, net: nn.Module, transforms: list[Any], optimizer: torch.optim.Optimizer
) -> None:
    """Run the usual loop: a DataLoader with two workers, and cosine decay of the rate over the training time."""
    data = ImageData(settings.dataset, root=settings.root, val_size=0, mean=MEAN, std=STD)
    images = ArrayImages(data.train_images, [Image.fromarray, *transforms])
    loader = DataLoader(images, 128, shuffle=True, num_workers=2, persistent_workers=True, worker_init_fn=leave_signals)
    rate, turns = optimizer.param_groups[0]["lr"], start(tester(net, data))
    for pixels, labels in chain.from_iterable(repeat(loader)):
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 + math.cos(math.pi * min(1.0, turns.seconds / settings.seconds))) / 2
        loss = F.cross_entropy(net(pixels), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        turns.step()


def plain_resnet(settings: argparse.Namespace, start: Start) -> None:
    """Train ResNet-18 with the 3×3 stem for CIFAR-10, SGD with Nesterov momentum, crop and flip."""
    net = resnet18(num_classes=10)
    net.conv1, net.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    transforms = [RandomCrop(32, padding=4), RandomHorizontalFlip(), ToTensor(), Normalize(MEAN, STD)]
    train_plainly(settings, start, net, transforms, optimizer)


def timm_resnet(settings: argparse.Namespace, start: Start) -> None:
    """Train timm's net with its default augmentation and optimizer."""
    timm, data, optim = (import_module(name) for name in ("timm", "timm.data", "timm.optim"))
    net = timm.create_model("resnet18", num_classes=10)
    optimizer = optim.create_optimizer_v2(net, opt="adamw", lr=2e-3, weight_decay=0.05)
    train_plainly(settings, start, net, [data.create_transform(32, is_training=True, mean=MEAN, std=STD)], optimizer)


if __name__ == "__main__":
    raise SystemExit(run_script())
