"""Where the time of a recipe's training step goes: python scripts/benchmarks/profile_step.py --recipe laptop."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Iterable
from typing import Any

from script import run_script
from timed_fit import Stopwatch, add_training_arguments, fit, subject_from
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from cifar_lit.bench.report import Row, publish
from cifar_lit.errors import Failure, UsageError

WHAT = (
    "Where the time of a training step under the Trainer goes. On a GPU: how long its kernels keep it busy, against the wall "
    "time of as many steps without the profiler, which slows the host; in the rest it waits for the host. On a CPU: the "
    "operators that take longest."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this measurement."""
    add_training_arguments(parser, recipe="tudui")
    parser.add_argument("--warmup", type=int, default=20, help="steps before anything is measured")
    parser.add_argument("--steps", type=int, default=50, help="steps that are timed, and then steps that are profiled")
    parser.add_argument("--top", type=int, default=12, help="how many operators are listed")


def run(settings: argparse.Namespace) -> None:
    """Measures and reports."""
    if settings.steps < 1 or settings.warmup < 1 or settings.top < 1:
        raise UsageError("a profile takes at least --warmup 1, --steps 1 and --top 1")
    subject = subject_from(settings)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would write lines of its own to stderr
    profilers: list[Any] = []

    def start(trainer: Any, model: Any) -> Callable[[int], None]:
        activity = ProfilerActivity.CPU if model.device.type == "cpu" else ProfilerActivity.CUDA
        ended = itertools.count()

        def toggle(steps: int) -> None:
            """Starts the profiler after the second round, of which the first warmed up, and stops it after the third."""
            match next(ended):
                case 1:
                    profilers.append(profile(activities=[activity]))
                    profilers[0].start()
                case 2:
                    profilers[0].stop()

        return toggle

    watch = Stopwatch(settings.steps, 2, settings.warmup, start)
    settings.precision = fit(subject, watch, max_epochs=100_000)
    (profiler,), (timed, profiled) = profilers, watch.rounds
    on_cpu = ProfilerActivity.CPU in profiler.activities
    time_of = "self_cpu_time_total" if on_cpu else "self_device_time_total"  # in microseconds, as all of the profiler's
    operators = [one for one in profiler.key_averages() if getattr(one, time_of) > 0 and (on_cpu or _is_kernel(one))]
    if not operators:
        raise Failure("the profiler saw no kernel: this torch, or this machine's driver, does not let it look")
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
        f"one profile of {settings.steps} steps after {settings.warmup + settings.steps}; operators' times are the profiler's",
    )


def _is_kernel(event: Any) -> bool:
    """Whether an event is work on a device other than the CPU, not the shadow of a named range."""
    return event.device_type != DeviceType.CPU and not getattr(event, "is_user_annotation", False)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of what (start, end) spans cover together; kernels of two streams may run at once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


if __name__ == "__main__":
    raise SystemExit(run_script())
