"""Whether an exported file answers as the net that it was made from, and how fast."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cifar_lit.errors import Failure
from cifar_lit.inference.export_formats import Runner

BATCHES = (1, 7, 256)
MOST_DIFFERENCE = 1e-4  # of a probability, in float32: a hundred times what rounding in another order makes of deep nets
LEAST_AGREEMENT = 0.95  # of the decisions, in int8
MOST_LOSS = 0.02  # of accuracy, in int8


class Check(NamedTuple):
    """A file beside its net over the same images.

    images: how many. difference: the largest of any probability. agreeing: images on which both decide alike.
    accuracy: fraction right, of the net and of the file; None where no labels are known.
    """

    images: int
    difference: float
    agreeing: int
    accuracy: tuple[float, float] | None

    @property
    def agreement(self) -> float:
        """The fraction of images on which both decide alike."""
        return self.agreeing / self.images


def check(net: Runner, file: Runner, images: Tensor, labels: Tensor | None) -> Check:
    """Runs both over uint8 images (N, C, H, W), the file's first in batches of 1 and of 7, which must come out as all others.

    labels: int64 (N,), or None. Fewer images than a batch are repeated to fill it.
    """
    expected = torch.cat([net(part) for part in images.split(BATCHES[-1])])
    difference = 0.0
    for batch in BATCHES:
        places = torch.arange(batch) % len(images)
        difference = max(difference, _difference(file(images[places]), expected[places]))
    found = torch.cat([file(part) for part in images.split(BATCHES[-1])])
    difference = max(difference, _difference(found, expected))
    before, after = expected.argmax(1), found.argmax(1)
    accuracy = None if labels is None else (_fraction(before == labels), _fraction(after == labels))
    return Check(len(images), difference, int((before == after).sum()), accuracy)


def _difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, infinite where the shapes differ or something is no number."""
    if found.shape != expected.shape or not bool(found.isfinite().all()):
        return float("inf")
    return float((found - expected).abs().max())


def _fraction(right: Tensor) -> float:
    return int(right.sum()) / len(right)


def refuse_disagreement(found: Check, int8: bool) -> None:
    """Raises Failure where a file does not answer as its net within the limits above; in float these leave only rounding."""
    if not int8:
        if not found.difference <= MOST_DIFFERENCE:
            raise Failure(
                f"the file does not answer as the net: a probability differs by {found.difference:.2g}, more than "
                f"{MOST_DIFFERENCE:g}, so it was not kept; another --to, or another version of torch or onnxruntime may do"
            )
        return
    loss = found.accuracy[0] - found.accuracy[1] if found.accuracy else 0.0
    if found.difference == float("inf") or found.agreement < LEAST_AGREEMENT or loss > MOST_LOSS:
        raise Failure(
            f"int8 changes too much of this net: {found.agreement:.1%} of the decisions agree (at least {LEAST_AGREEMENT:.0%} "
            f"must), {100 * loss:.1f} points of accuracy are lost (at most {100 * MOST_LOSS:.0f} may), so the file was not "
            "kept: leave --quantize out"
        )


def latencies(
    runners: Sequence[Runner], images: Tensor, seconds: float = 1.0, least: int = 5, most: int = 100
) -> list[list[float]]:
    """The seconds that each runner takes for `images`, run in turn, so that a disturbance meets all; the first turn warms up.

    A list of turns for each runner: at least `least`, then as many as start within `seconds`, at most `most`.
    """
    taken: list[list[float]] = [[] for _ in runners]
    started = time.perf_counter()
    for turn in range(most + 1):
        if turn > least and time.perf_counter() - started > seconds:
            break
        for runner, times in zip(runners, taken, strict=True):
            before = time.perf_counter()
            runner(images)
            times.append(time.perf_counter() - before)
    return [times[1:] for times in taken]


def medians(taken: Sequence[Sequence[float]]) -> list[float]:
    """The median of each runner's seconds."""
    return [statistics.median(times) for times in taken]
