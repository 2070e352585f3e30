"""Whether some widths of a net suit a CPU better: python scripts/benchmarks/widths.py --precision float32."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from report import Row, publish, spread
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from cifar_lit.models.registry import lay_out
from cifar_lit.models.whitened import WhitenedNet

WHAT = (
    "Time forward and backward pass of the net of the cpu recipes with several widths of its groups, which take turns, "
    "and report operations per second (multiplications and additions)."
)
WIDTHS = ((32, 128, 128), (32, 192, 192), (40, 160, 160), (48, 192, 192), (64, 128, 128), (64, 256, 256))
BATCH_SIZE, CLASSES = 500, 10  # those of the recipes


def run(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=WHAT)
    parser.add_argument("--precision", choices=("bf16", "float32"), default="bf16", help="type of the convolutions")
    parser.add_argument("--side", type=int, default=24, help="height and width of the images in pixels")
    parser.add_argument("--rounds", type=int, default=8, help="timed rounds")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    settings = parser.parse_args(argv)
    torch.set_num_threads(settings.threads)
    nets = [net_of(widths, settings.side) for widths in WIDTHS]
    operations = []
    for net in nets:
        with FlopCounterMode(display=False) as counter:
            seconds_of(net, settings.side, settings.precision)  # the first step, which also prepares the kernels
        operations.append(counter.get_total_flops() / 1e9)
    rounds = []
    for _ in range(settings.rounds):
        rounds.append([seconds_of(net, settings.side, settings.precision) for net in nets])
    rows: list[Row] = []
    for widths, count, times in zip(WIDTHS, operations, zip(*rounds, strict=True), strict=True):
        name = "/".join(map(str, widths))
        rows.append((f"{name}: step", spread(1e3 * seconds for seconds in times), "ms"))
        rows.append((f"{name}: operations", spread(count / seconds for seconds in times), "G/s"))
    publish("widths", vars(settings), rows)


def net_of(widths: Sequence[int], side: int) -> WhitenedNet:
    """Return a net for training, whose first layer stays as it is drawn."""
    net = WhitenedNet(
        channels=3, image_size=(side, side), num_classes=CLASSES, width=1.0, widths=widths, whiten_bias=False
    )
    lay_out(net, "whitened")
    net.is_prepared = True
    return net.train()


def seconds_of(net: nn.Module, side: int, precision: str) -> float:
    """Return the time of a forward and a backward pass."""
    images = torch.rand(BATCH_SIZE, 3, side, side).to(memory_format=torch.channels_last)
    labels = torch.arange(BATCH_SIZE) % CLASSES
    net.zero_grad()
    start = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = F.cross_entropy(net(images), labels)
    loss.backward()
    return time.perf_counter() - start


if __name__ == "__main__":
    run()
