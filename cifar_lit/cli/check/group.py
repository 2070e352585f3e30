"""What a group of processes is tried with: numbers that each can reckon by itself, then how long few and many bytes take."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from cifar_lit.cli.check.device import Found, Try, clock

FEW, FEW_TIMES = 2, 50  # float32 numbers, and how often they are sent; the median counts
MANY, MANY_TIMES = 2**24, 3  # 64 MiB; the gradients of resnet18 take 43
LENGTH = 1000  # of the tensors whose values are checked


def group_tries(rank: int, size: int, device: torch.device) -> Iterator[Try]:
    """All tries of the group that torch.distributed has, by name; each process must make them, in this order."""
    yield "all_reduce, broadcast and all_gather of known numbers", partial(values, rank, size, device)
    yield f"all_reduce of {4 * FEW} bytes", partial(time_reduce, FEW, FEW_TIMES, size, device)
    yield f"all_reduce of {4 * MANY // 2**20} MiB", partial(time_reduce, MANY, MANY_TIMES, size, device)


def values(rank: int, size: int, device: torch.device) -> Found:
    """Sums, copies and collections of whole numbers, which must be exact."""
    numbers = torch.arange(LENGTH, dtype=torch.float32, device=device)
    total = numbers * (rank + 1)
    dist.all_reduce(total)
    copied = numbers + 7 if rank == 0 else torch.zeros_like(numbers)
    dist.broadcast(copied, 0)
    parts = [torch.empty_like(numbers) for _ in range(size)]
    dist.all_gather(parts, numbers - rank)
    expected: dict[str, tuple[Tensor, Tensor]] = {
        "all_reduce": (total, numbers * (size * (size + 1) // 2)),
        "broadcast": (copied, numbers + 7),
        "all_gather": (torch.stack(parts), numbers - torch.arange(size, device=device)[:, None]),
    }
    return Found("", wrong(expected))


def wrong(expected: dict[str, tuple[Tensor, Tensor]]) -> str:
    """Which of the pairs of what came and what was expected differ, and in how many numbers; empty if none."""
    differing = {name: int((found != right).sum()) for name, (found, right) in expected.items()}
    return ", ".join(f"{name} brought {count:,} wrong numbers" for name, count in differing.items() if count)


def time_reduce(count: int, times: int, size: int, device: torch.device) -> Found:
    """The median time of an all_reduce of `count` float32 numbers, after one that does not count."""
    numbers = torch.empty(count, device=device)
    seconds = []
    for _ in range(times + 1):
        numbers.fill_(1)
        dist.barrier()
        started = clock(device)
        dist.all_reduce(numbers)
        seconds.append(clock(device) - started)
    median = statistics.median(seconds[1:])
    figure = f"{median * 1e3:,.3f} ms" if count == FEW else f"{4 * count / median / 1e9:,.2f} GB/s"
    return Found(figure, wrong({"all_reduce": (numbers, torch.full_like(numbers, size))}))
