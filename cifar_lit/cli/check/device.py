"""What a device is tried with: a matrix product, a small convolution net there and back, and its memory.

Everything is computed on the CPU in float64 too, from the same numbers, and compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# The largest difference over the largest number. CPUs were off by 2e-7 and 2e-3 in the product, 2e-6 and 7e-3 in the net;
# GPUs add up in another order, and cuDNN has ways that round more.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
NET_TOLERANCE = {torch.float32: 5e-4, torch.bfloat16: 5e-2}
LEAST_SECONDS = 0.2  # that a figure is taken from
SIDE = {"cpu": 512}  # rows and columns of the matrices; elsewhere BIG_SIDE
BIG_SIDE = 2048
MEMORY = {"cpu": 64}  # MiB that are copied; elsewhere BIG_MEMORY
BIG_MEMORY = 256


class Found(NamedTuple):
    """What came of a try. figure: such as "12 GFLOP/s", empty where there is none. wrong: what is, empty if nothing."""

    figure: str
    wrong: str


Try = tuple[str, Callable[[], Found]]


def device_tries(device: torch.device, place: Callable, bf16: bool) -> Iterator[Try]:
    """All tries of a device, by name. place: puts tensors and modules on it. bf16: whether it has that too."""
    kinds = [torch.float32, torch.bfloat16] if bf16 else [torch.float32]
    for kind in kinds:
        yield f"matrix product, {_name(kind)}", partial(product, device, place, kind)
    for kind in kinds:
        yield f"convolution net forward and backward, {_name(kind)}", partial(net, device, place, kind)
    size = MEMORY.get(device.type, BIG_MEMORY)
    yield f"{size} MiB there, copied, and back", partial(memory, device, place, size)


def product(device: torch.device, place: Callable, kind: torch.dtype) -> Found:
    """A product of two square matrices, several times over: the first result and the last are looked at."""
    side = SIDE.get(device.type, BIG_SIDE)
    # numbers that bfloat16 holds exactly, so that only the product itself can differ
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(side, side, generator=generator).bfloat16().double() for _ in range(2))
    expected = first @ second
    there = [place(matrix.to(kind)) for matrix in (first, second)]
    results = [there[0] @ there[1]]

    def again() -> None:
        results[1:] = [there[0] @ there[1]]

    seconds = _seconds(again, device)
    return Found(f"{2 * side**3 / seconds / 1e9:,.0f} GFLOP/s", difference(results, [expected] * 2, TOLERANCE[kind]))


def net(device: torch.device, place: Callable, kind: torch.dtype) -> Found:
    """Loss and gradients of a small net; without ReLU and max pooling, whose steps turn rounding into differences."""
    side, images = 16, 32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        here = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.GELU()),
            *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GELU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()),
            nn.Linear(512, 10),
        )
        batch, labels = torch.randn(images, 3, side, side), torch.randint(10, (images,))
    there = place(deepcopy(here))
    expected = _gradients(here.double(), batch.double(), labels, torch.autocast("cpu", enabled=False))
    with_autocast = torch.autocast(device.type, kind, enabled=kind != torch.float32)
    inputs, targets = place(batch), place(labels)
    found = _gradients(there, inputs, targets, with_autocast)
    wrong = difference(found, expected, NET_TOLERANCE[kind])
    seconds = _seconds(lambda: _gradients(there, inputs, targets, with_autocast), device)
    return Found(f"{images / seconds:,.0f} images/s", wrong)


def _gradients(module: nn.Module, images: Tensor, labels: Tensor, autocast: torch.autocast) -> list[Tensor]:
    """Loss, then the gradient of each parameter."""
    with autocast:
        loss = F.cross_entropy(module(images).to(images.dtype), labels)
    return [loss.detach(), *torch.autograd.grad(loss, list(module.parameters()))]


def memory(device: torch.device, place: Callable, size: int) -> Found:
    """`size` MiB of counted numbers to the device, copied there, and back: they must be the same."""
    counted = torch.arange(size * 2**18, dtype=torch.int32)
    there = place(counted.clone())
    copied = torch.empty_like(there)
    seconds = _seconds(lambda: copied.copy_(there), device)
    wrong = int((copied.cpu() != counted).sum())
    said = f"{wrong:,} of {len(counted):,} numbers came back changed" if wrong else ""
    return Found(f"{2 * size * 2**20 / seconds / 1e9:,.1f} GB/s", said)  # each byte is read and written


def difference(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> str:
    """What is wrong with tensors, empty if each differs by at most `tolerance` times the largest number expected in it."""
    pairs = [(got.cpu().double(), right.double()) for got, right in zip(found, expected, strict=True)]
    off = float(torch.stack([(got - right).abs().max() / right.abs().max() for got, right in pairs]).max())
    if off <= tolerance:
        return ""
    return f"off by {off:.1e} of the largest number, where {tolerance:.0e} is allowed"  # nan too


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that `work` takes, the device waited for, from as many turns as LEAST_SECONDS need."""
    turns = 1
    while True:
        started = clock(device)
        for _ in range(turns):
            work()
        seconds = clock(device) - started
        if seconds >= LEAST_SECONDS:
            return seconds / turns
        turns *= 2


def clock(device: torch.device) -> float:
    """Seconds, read when the device has done all that it was given."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
    return time.perf_counter()


def _name(kind: torch.dtype) -> str:
    return "bf16" if kind == torch.bfloat16 else "float32"
