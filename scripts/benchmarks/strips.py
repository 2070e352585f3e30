"""Time of a training step with weight gradients from strips of images: python scripts/benchmarks/strips.py."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from script import run_script
from timed_fit import build
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from cifar_lit.bench.report import Row, publish, spread
from cifar_lit.cli.flags import recipe_path
from cifar_lit.memory import keep_freed_memory
from cifar_lit.models import strips
from cifar_lit.models.strips import MAX_WIDTH, in_strips
from cifar_lit.runs.config_file import plain_values
from cifar_lit.training.optimizers import build_optimizer

WHAT = "Compare training steps in bfloat16 with and without strips, in turn, and weight gradients of single layers."
RECIPES = ("laptop91", "laptop", "fast94")
SIDES = (24, 28, 32)
LAYERS = ((500, 192, 2), (500, 192, 3), (500, 192, 5), (500, 192, 7), (500, 256, 7), (2000, 256, 3), (500, 192, 10))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds")


def run(settings: argparse.Namespace) -> None:
    """Measure and report."""
    keep_freed_memory()
    rows: list[Row] = []
    for images, channels, side in LAYERS:
        maps, gradient = (
            torch.randn(images, channels, side, side).bfloat16().contiguous(memory_format=torch.channels_last)
            for _ in range(2)
        )
        shape = (channels, channels, 3, 3)
        calls = {
            "direct": lambda maps=maps, gradient=gradient, shape=shape: conv2d_weight(maps, shape, gradient, padding=1),
            "strips": lambda maps=maps, gradient=gradient, shape=shape: conv2d_weight(
                in_strips(maps), shape, in_strips(gradient), padding=1
            ),
        }
        label = f"weight gradient, {images:,} × {channels}→{channels}, {side} px"
        rows.append((label, ratio(calls, settings.rounds), "×"))
    for name in RECIPES:
        for side in SIDES:
            rows.append((f"{name}, step at {side} px", step_ratio(name, side, settings.rounds), "×"))
    publish("strips", vars(settings), "time with strips / without", rows)


def step_ratio(name: str, side: int, rounds: int) -> Any:
    """Return the time of a step with strips, relative to one without."""
    recipe: dict[str, Any] = plain_values(recipe_path(name))
    _, model = build(recipe["model"], {"dataset": "shapes", "count": 100})
    net, size = model.net.to(memory_format=torch.channels_last), recipe["data"]["batch_size"]
    net.initialise(torch.randn(100, 3, 32, 32))  # type: ignore[operator]
    options = model.hparams["optimizer_options"]
    optimizer = build_optimizer(net, "muon", model.hparams["lr"], options, precision="bf16-mixed")
    images = torch.randn(size, 3, side, side).contiguous(memory_format=torch.channels_last)
    labels = torch.arange(size) % 10

    def step(width: int) -> None:
        strips.MAX_WIDTH = width
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return ratio({"direct": lambda: step(0), "strips": lambda: step(MAX_WIDTH)}, rounds)


def ratio(calls: dict[str, Callable[[], object]], rounds: int) -> Any:
    """Return the spread of the time with strips relative to the direct one, over rounds in turn."""
    ratios = []
    for number in range(rounds + 1):
        seconds = {}
        for name, call in calls.items():
            before = time.perf_counter()
            call()
            seconds[name] = time.perf_counter() - before
        if number > 0:  # the first round warms up
            ratios.append(seconds["strips"] / seconds["direct"])
    return spread(ratios)


if __name__ == "__main__":
    raise SystemExit(run_script())
