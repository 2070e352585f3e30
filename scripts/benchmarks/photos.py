"""Compare `finetune` with a plain PyTorch loop and timm's script: photos.py FOLDER --size 128 --json FILE."""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import timm
import torch
from report import Row, figures_of, publish, spread, write_figures
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision import transforms as T
from torchvision.datasets import ImageFolder

from cifar_lit.base.settings import plain_values
from cifar_lit.base.text import note
from cifar_lit.cli.flags import recipe_path
from cifar_lit.models.registry import build_net
from cifar_lit.training.pretrained_weights import load_pretrained

WHAT = (
    "Fine-tune the same pretrained net on the same photos (FOLDER/train/CLASS and FOLDER/test/CLASS) with the recipe "
    "`finetune`, with the usual hand-written loop (AdamW, one cycle, random crops and flips, the last weights are "
    "tested), and with --timm, the path of train.py in a clone of timm. Rates, batch size and weight decay are those "
    "of the recipe. Choose --epochs and --timm-epochs so that all take about the same time."
)
WORKERS = 2
RECIPE: dict[str, Any] = plain_values(recipe_path("finetune"))


def run(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=WHAT)
    parser.add_argument("root", metavar="FOLDER", type=Path, help="photos")
    parser.add_argument("--size", type=int, default=224, help="side of the images in pixels")
    parser.add_argument("--epochs", type=int, default=5, help="epochs of the plain loop")
    parser.add_argument("--timm", metavar="FILE", type=Path, help="train.py of timm")
    parser.add_argument("--timm-epochs", type=int, default=5, help="epochs of timm's script")
    parser.add_argument("--runs", type=int, default=3, help="number of seeds")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the results to this file")
    settings = parser.parse_args(argv)
    programs = {"finetune": finetune, "plain loop": plain_loop}
    if settings.timm:
        programs["timm's script"] = timm_script
    kept = {**vars(settings), "photos": settings.root.name, "timm": timm.__version__}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in programs}
    for seed in range(settings.runs):
        for name, train in programs.items():
            started = time.perf_counter()
            accuracy = train(settings, seed)
            runs[name].append({"seed": seed, "accuracy": accuracy, "seconds": time.perf_counter() - started})
            note(f"{name}, seed {seed}: {100 * accuracy:.2f} %, {runs[name][-1]['seconds']:.0f} s")
            if settings.json:
                write_figures(settings.json, figures_of("photos", kept, rows_of(runs), runs=runs))
    publish("photos", kept, rows_of(runs), runs=runs)


def rows_of(runs: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """Return accuracies, and times from the start of the program to its result."""
    rows: list[Row] = []
    for name, same in runs.items():
        if same:
            rows.append((f"{name}: test accuracy", spread(100 * one["accuracy"] for one in same), "%"))
            rows.append((f"{name}: start to result", spread(one["seconds"] for one in same), "s"))
    return rows


def finetune(settings: argparse.Namespace, seed: int) -> float:
    """Return the test accuracy of the recipe."""
    with TemporaryDirectory() as logs:
        words = ["train", "--recipe", "finetune", "--data-dir", settings.root, "--data.image_size", settings.size]
        call(["-m", "cifar_lit", *words, "--seed", seed, "--logs", logs])
        (metrics,) = Path(logs).glob("*/metrics.json")
        return float(json.loads(metrics.read_text(encoding="utf-8"))["test"]["accuracy"])


def plain_loop(settings: argparse.Namespace, seed: int) -> float:
    """Return the test accuracy of the hand-written loop after its last epoch."""
    torch.manual_seed(seed)
    name, model = RECIPE["model"]["net"], RECIPE["model"]
    norm = T.Normalize([0.5] * 3, [0.5] * 3)  # mean and deviation of the pretraining
    augmented = [T.RandomResizedCrop(settings.size, scale=(0.5, 1.0)), T.RandomHorizontalFlip(), T.ToTensor(), norm]
    plain = [T.Resize(settings.size), T.CenterCrop(settings.size), T.ToTensor(), norm]
    train = ImageFolder(str(settings.root / "train"), T.Compose(augmented))
    test = ImageFolder(str(settings.root / "test"), T.Compose(plain))
    batch_size = RECIPE["data"]["batch_size"]
    loader = DataLoader(train, batch_size, shuffle=True, num_workers=WORKERS, drop_last=True)
    net = build_net(name, num_classes=len(train.classes), channels=3, image_size=(settings.size, settings.size))
    load_pretrained(net, name, "imagenet")
    optimizer = torch.optim.AdamW(
        net.parameters(), model["lr"], weight_decay=model["optimizer_options"]["weight_decay"]
    )
    steps = settings.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, model["lr"], total_steps=steps)
    for _ in range(settings.epochs):
        net.train()
        for images, labels in loader:
            with torch.autocast("cpu"):
                loss = F.cross_entropy(net(images), labels, label_smoothing=model["label_smoothing"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    net.eval()
    with torch.no_grad():
        right = sum(int((net(images).argmax(1) == labels).sum()) for images, labels in DataLoader(test, 64))
    return right / len(test)


def timm_script(settings: argparse.Namespace, seed: int) -> float:
    """Return the test accuracy that timm's script prints for its last epoch."""
    model = RECIPE["model"]
    classes = len([*(settings.root / "train").iterdir()])
    words = ["--data-dir", settings.root, "--train-split", "train", "--val-split", "test", "--device", "cpu"]
    words += ["--model", model["net"].partition("/")[2], "--pretrained", "--num-classes", classes]
    words += ["--img-size", settings.size, "--seed", seed]
    words += ["--opt", "adamw", "--lr", model["lr"], "--weight-decay", model["optimizer_options"]["weight_decay"]]
    words += ["--epochs", settings.timm_epochs, "--warmup-epochs", 0, "--batch-size", RECIPE["data"]["batch_size"]]
    words += ["--workers", WORKERS, "--amp", "--amp-dtype", "bfloat16", "--no-prefetcher"]
    with TemporaryDirectory() as output:
        net = timm.create_model(model["net"].partition("/")[2])
        load_pretrained(net, model["net"], "imagenet")
        weights = Path(output) / "weights.pth"
        torch.save(net.state_dict(), weights)
        call([settings.timm, *words, "--pretrained-path", weights, "--output", output])
        (summary,) = Path(output).glob("*/summary.csv")
        with summary.open(encoding="utf-8") as lines:
            *_, last = csv.DictReader(lines)
    return float(last["eval_top1"]) / 100


def call(words: Sequence[object]) -> None:
    """Run a Python program; exit with its message if it fails."""
    answer = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True)
    if answer.returncode:
        raise SystemExit(answer.stderr.strip())


if __name__ == "__main__":
    run()
