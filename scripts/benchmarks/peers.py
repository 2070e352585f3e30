"""Ours and what others would write, for the same time on the same cores and pixels: python scripts/benchmarks/peers.py."""

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
    "Trains a recipe of ours, the tutorial's loop, a plain PyTorch ResNet-18 and, where timm is installed, a plain timm training "
    "on the CPU, each in a process of its own, in turns of some seconds, until each has trained for the same time. After each "
    "turn they are tested with the clock stopped, on 2,000 test images, in the end on all. The recipe ends when its epochs do; "
    "the rates of ResNet-18 and timm fall to 0 over the time. All train on all training images; nothing is chosen by a test."
)
MEAN, STD = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]
PART = 2000  # test images that a look on the way takes; a ResNet needs longer for all than for its turn


class Turns:
    """A peer's clock: when a turn is over it is stopped, the net is tested, and the next turn is waited for."""

    def __init__(self, connection: Connection, turns: int, accuracy: Callable[[int], float]) -> None:
        self._connection, self._left, self._accuracy, self._spent = connection, turns, accuracy, 0.0
        connection.send("ready")
        self._wait()

    def _wait(self) -> None:
        self._turn: float = self._connection.recv()
        self._begun = time.perf_counter()

    @property
    def seconds(self) -> float:
        """That it has trained for."""
        return self._spent + time.perf_counter() - self._begun

    def step(self, last: bool = False) -> None:
        """After each step of the training; `last`: it has come to its end."""
        seconds = self.seconds
        if seconds - self._spent >= self._turn or last:
            self._spent, self._left = seconds, self._left - 1
            last = last or not self._left
            self._connection.send((seconds, self._accuracy(sys.maxsize if last else PART), last))
            self._wait()


Start = Callable[[Callable[[int], float]], Turns]  # of what tests the net, on so many images


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this measurement."""
    parser.add_argument("--recipe", default="laptop", help="ours")
    parser.add_argument("--data-dir", dest="root", metavar="PATH", help="where CIFAR-10's archive is")
    parser.add_argument("--dataset", default="cifar10", help="shapes, for a trial")
    parser.add_argument(
        "--seconds", type=float, default=25.0, help="of training of each; to compare, what the recipe takes"
    )
    parser.add_argument("--turns", type=int, default=10, help="that this time is cut into")
    parser.add_argument("--seed", type=int, default=0, help="of all")
    parser.add_argument("--plot", metavar="FILE.png", help="draw accuracy over seconds")


def run(settings: argparse.Namespace) -> None:
    """Measures and reports."""
    if settings.seconds <= 0 or settings.turns < 1:
        raise UsageError("--seconds must be more than 0, and --turns at least 1")
    if settings.plot:
        make_parent(Path(settings.plot))
    peers: dict[str, Callable[..., None]] = {settings.recipe: ours, "tutorial": tutorial, "ResNet-18": plain_resnet}
    if find_spec("timm"):
        peers["timm"] = timm_resnet
    else:
        note("timm is not installed and left out: `pip install timm` for it")
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
        lost = f"the process of {name} ended: what it printed says why"
    finally:
        for connection in connections.values():  # those that wait for their turn end with their loaders' workers
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
    """A peer's process."""
    quieten()
    leave_signals(0)
    torch.set_num_threads(threads)
    torch.manual_seed(settings.seed)
    with suppress(EOFError, BrokenPipeError):  # the measurement is over
        train(settings, partial(Turns, connection, settings.turns))


# ---- the peers: each builds its training, then starts its turns and tells them of every step


class TurnsCallback(Callback):
    """For a training under the Trainer."""

    def __init__(self, start: Start) -> None:
        self._start = start

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """All is where the training begins."""
        batches, self._steps = list(trainer.datamodule.test_dataloader()), trainer.estimated_stepping_batches  # type: ignore[attr-defined]

        def accuracy(images: int) -> float:
            with undisturbed(trainer, pl_module):
                return accuracy_of(trainer, pl_module, batches[: max(1, images // len(batches[0].labels))])

        self._turns = self._start(accuracy)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        """Tells of the step."""
        self._turns.step(trainer.global_step == self._steps)


def ours(settings: argparse.Namespace, start: Start) -> None:
    """A recipe under the Trainer, with all that a run has on."""
    recipe: dict[str, Any] = recipe_settings(recipe_path(settings.recipe))
    own = {"dataset": settings.dataset, "root": settings.root, "val_size": 0, "seed": settings.seed}
    images, model = build(recipe["model"], {**recipe["data"], **own})
    precision = recipe["trainer"].get("precision") or choose_precision(detect_machine(), "cpu")[0]
    subject = Subject(model, images, {"accelerator": "cpu", "devices": 1, "precision": precision})
    fit(subject, TurnsCallback(start), max_epochs=recipe["trainer"]["max_epochs"])


def tester(net: nn.Module, data: ImageData) -> Callable[[int], float]:
    """Tests a net in evaluation mode, on images normalised as it is trained."""

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
    """The tutorial's loop, with net, rate and batch size of the recipe `tudui`."""
    recipe: dict[str, Any] = recipe_settings(recipe_path("tudui"))
    own = {"dataset": settings.dataset, "root": settings.root, "val_size": 0}
    data, model = build(recipe["model"], {**recipe["data"], **own})
    lay_out_plainly(model.net)
    torch.manual_seed(settings.seed)  # of the order; `build` sets one for the net
    loop = TutorialLoop(data.train_images, data.split, model.net, data.batch_size, recipe["model"]["lr"])
    turns = start(tester(model.net, data))
    for _ in loop.steps(torch.device("cpu")):
        turns.step()


def train_plainly(
    settings: argparse.Namespace, start: Start, net: nn.Module, moves: list[Any], optimizer: torch.optim.Optimizer
) -> None:
    """The usual loop: a DataLoader of two workers, a rate that falls as a cosine over the time there is."""
    data = ImageData(settings.dataset, root=settings.root, val_size=0, mean=MEAN, std=STD)
    images = ArrayImages(data.train_images, [Image.fromarray, *moves])
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
    """ResNet-18 with the 3×3 stem that is usual on CIFAR-10, SGD with Nesterov momentum, crop and flip."""
    net = resnet18(num_classes=10)
    net.conv1, net.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    moves = [RandomCrop(32, padding=4), RandomHorizontalFlip(), ToTensor(), Normalize(MEAN, STD)]
    train_plainly(settings, start, net, moves, optimizer)


def timm_resnet(settings: argparse.Namespace, start: Start) -> None:
    """timm's net, augmentation and optimizer as its functions make them."""
    timm, data, optim = (import_module(name) for name in ("timm", "timm.data", "timm.optim"))
    net = timm.create_model("resnet18", num_classes=10)
    optimizer = optim.create_optimizer_v2(net, opt="adamw", lr=2e-3, weight_decay=0.05)
    train_plainly(settings, start, net, [data.create_transform(32, is_training=True, mean=MEAN, std=STD)], optimizer)


if __name__ == "__main__":
    raise SystemExit(run_script())
