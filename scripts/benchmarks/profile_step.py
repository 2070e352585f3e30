"""Profile a recipe's training step: python scripts/benchmarks/profile_step.py --recipe cpu91."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Iterable
from typing import Any

from report import Row, publish
from script import run_script
from timed_fit import Stopwatch, add_training_arguments, default_warmup, fit, subject_from
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from cifar_lit.base.errors import Failure, UsageError

WHAT = (
    "Profile a training step under the Trainer. On a GPU: the time in kernels, and the wall time of equally many "
    "steps without the profiler, which slows the host; the difference is time waiting for the host. On a CPU: the "
    "slowest operators."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    add_training_arguments(parser, recipe="tudui")
    parser.add_argument("--warmup", type=int, help="warm-up steps; default: 20 after the whitening schedule")
    parser.add_argument("--steps", type=int, default=50, help="timed steps, and equally many profiled steps")
    parser.add_argument("--top", type=int, default=12, help="number of listed operators")


def run(settings: argparse.Namespace) -> None:
    """Measure and report."""
    if min(settings.steps, settings.top, 1 if settings.warmup is None else settings.warmup) < 1:
        raise UsageError("--warmup, --steps and --top must be at least 1")
    subject = subject_from(settings, settings.flags)
    settings.warmup = settings.warmup or default_warmup(subject, 20)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences its own lines on stderr
    profilers: list[Any] = []

    def start(trainer: Any, model: Any) -> Callable[[int], None]:
        activity = ProfilerActivity.CPU if model.device.type == "cpu" else ProfilerActivity.CUDA
        ended = itertools.count()

        def toggle(steps: int) -> None:
            """Start the profiler after the second round (the first warmed up), and stop it after the third."""
            match next(ended):
                case 1:
                    profilers.append(profile(activities=[activity]))
                    profilers[0].start()
                case 2:
                    profilers[0].stop()

        return toggle

    watch = Stopwatch(settings.steps, 2, settings.warmup, start)
    settings.precision = fit(subject, watch)
    (profiler,), (timed, profiled) = profilers, watch.rounds
    on_cpu = ProfilerActivity.CPU in profiler.activities
    time_of = "self_cpu_time_total" if on_cpu else "self_device_time_total"  # microseconds
    operators = [one for one in profiler.key_averages() if getattr(one, time_of) > 0 and (on_cpu or _is_kernel(one))]
    if not operators:
        raise Failure("the profiler recorded no kernel: this torch or driver does not support it")
    wall, speed = 1e3 * timed.ours / timed.steps, timed.images / timed.ours
    rows: list[Row] = [("without the profiler", wall, "ms a step"), ("speed", speed, "images/s")]
    if not on_cpu:
        spans = [(event.time_range.start, event.time_range.end) for event in profiler.events() if _is_kernel(event)]
        busy = 1e-3 * covered(spans) / profiled.steps
        rows += [("kernels", busy, "ms a step"), ("idle", max(0.0, wall - busy), "ms a step")]
    rows += [
        (
            f"{one.key:.90}, {one.count / profiled.steps:g} calls",
            1e-3 * getattr(one, time_of) / profiled.steps,
            "ms a step",
        )
        for one in sorted(operators, key=lambda one: -getattr(one, time_of))[: settings.top]
    ]
    publish(
        "profile",
        vars(settings),
        f"{settings.recipe} · {settings.net} · batch {settings.batch_size} · {settings.precision}",
        rows,
        f"{settings.steps} profiled steps after {settings.warmup + settings.steps}; times of operators as profiled",
    )


def _is_kernel(event: Any) -> bool:
    """Return whether an event is work on a device other than the CPU, and no user annotation."""
    return event.device_type != DeviceType.CPU and not getattr(event, "is_user_annotation", False)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of (start, end) spans; kernels of two streams may overlap."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


if __name__ == "__main__":
    raise SystemExit(run_script())
