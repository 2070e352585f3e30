"""Measure `fast_gradients` in training steps on a CPU: python scripts/benchmarks/gradients.py cpu91:24 finetune:128."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from progress import Progress
from script import run_script, set_threads
from torch.nn import functional as F

from cifar_lit.bench.report import Row, publish, spread
from cifar_lit.cli.flags import recipe_path
from cifar_lit.errors import UsageError
from cifar_lit.models.fast_gradients import fast_gradients
from cifar_lit.models.registry import build_net
from cifar_lit.runs.config_file import plain_values

WHAT = (
    "Measure the forward and backward pass of recipes in bfloat16 with fast gradients, without them, and in float32. "
    "The three take turns. The optimizer is not included."
)
CLASSES = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.add_argument("steps", nargs="+", metavar="RECIPE:SIDE", help="recipes, each with a side of its images")
    parser.add_argument("--rounds", type=int, default=11, help="timed rounds")
    parser.add_argument("--threads", type=set_threads, help="torch's threads")


def run(settings: argparse.Namespace) -> None:
    """Measure and report."""
    if settings.rounds < 1:
        raise UsageError("--rounds must be at least 1")
    rows: list[Row] = []
    progress = Progress(len(settings.steps), "recipe")
    for number, step in enumerate(settings.steps):
        name, _, side = step.partition(":")
        if not side.isdecimal():
            raise UsageError(f"{step}: name a recipe and a side in pixels, such as cpu91:24")
        seconds = seconds_of_steps(plain_values(recipe_path(name)), int(side), settings.rounds)
        for other in ("plain", "float32"):
            ratios = [fast / slow for fast, slow in zip(seconds["fast"], seconds[other], strict=True)]
            rows.append((f"{name}, {side} px: fast / {other}", spread(ratios), "×"))
        progress.advance(number + 1)
    publish("gradients", vars(settings), "forward and backward pass", rows)


def seconds_of_steps(recipe: dict[str, Any], side: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each step with fast gradients, without them (`plain`), and in float32."""
    torch.manual_seed(0)
    model, size = recipe["model"], recipe["data"]["batch_size"]
    net: Any = build_net(
        model["net"], channels=3, image_size=side, num_classes=CLASSES, options=model.get("net_options")
    )
    net = net.to(memory_format=torch.channels_last).train()
    net.is_prepared = True  # a first layer of random numbers takes as long as a computed one
    parameters = list(net.parameters())
    for parameter in parameters[: int(recipe.get("finetune", {}).get("frozen", 0) * len(parameters))]:
        parameter.requires_grad_(False)
    images = torch.randn(size, 3, side, side).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (size,))
    ways: dict[str, Callable[[], object]] = {
        "fast": partial(step_seconds, net, images, labels, bfloat16=True, fast=True),
        "plain": partial(step_seconds, net, images, labels, bfloat16=True),
        "float32": partial(step_seconds, net, images, labels),
    }
    seconds: dict[str, list[Any]] = {way: [] for way in ways}
    for _ in range(rounds + 1):  # the first round warms up
        for way, measure in ways.items():
            seconds[way].append(measure())
    return {way: times[1:] for way, times in seconds.items()}


def step_seconds(
    net: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, bfloat16: bool = False, fast: bool = False
) -> float:
    """Return the seconds of a forward and backward pass."""
    started = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16), fast_gradients(images) if fast else nullcontext():
        loss = F.cross_entropy(net(images), labels)
    loss.backward()
    net.zero_grad()
    return time.perf_counter() - started


if __name__ == "__main__":
    raise SystemExit(run_script())
