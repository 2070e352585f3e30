"""Where the time of a recipe's training step goes: python scripts/benchmarks/profile_step.py --recipe laptop."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

from script import run_script
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from cifar_lit.bench.report import figures_of, publish, significant
from cifar_lit.bench.training import Lap, Stopwatch, add_training_arguments, fit, subject_from
from cifar_lit.errors import Failure, UsageError

WHAT = (
    "Where the time of a training step under the Trainer goes. On a GPU: how long its kernels keep it busy, against the wall "
    "time of as many steps without the profiler, which slows the host; in the rest it waits for the host. On a CPU: the "
    "operators that take longest."
)


class Operator(NamedTuple):
    """A kernel or an operator: calls, and seconds of its own, over all profiled steps."""

    name: str
    calls: int
    seconds: float


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
    activity = ProfilerActivity.CPU
    profiler: Any = None

    def between(lap: Lap | None) -> None:
        """Profiles the second lap only."""
        nonlocal profiler, activity
        if lap and not profiler:
            if subject.model.device.type != "cpu":
                activity = ProfilerActivity.CUDA
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would write lines of its own to stderr
            profiler = profile(activities=[activity])
            profiler.start()
        elif lap:
            profiler.stop()

    watch = Stopwatch(settings.warmup, settings.steps, count=2, between=between)
    settings.precision = fit(subject, watch, max_epochs=100_000)
    on_cpu = activity is ProfilerActivity.CPU
    timed, profiled = watch.laps
    longest = operators(profiler.key_averages(), on_cpu)
    if not longest:
        raise Failure("the profiler saw no kernel: this torch, or this machine's driver, does not let it look")
    spans = [(event.time_range.start, event.time_range.end) for event in profiler.events() if _is_kernel(event)]
    wall = 1e3 * timed.seconds / timed.steps
    busy = None if on_cpu else 1e-3 * covered(spans) / profiled.steps  # the profiler counts in microseconds
    share = None if busy is None else round(min(1.0, busy / wall), 4)
    speed, total = significant(timed.images / timed.seconds), sum(one.seconds for one in longest)
    rows: list[tuple[str, float, str]] = [("wall", wall, "ms a step")]
    line = f"{wall:.3f} ms a step without the profiler · {speed:,.0f} images/s"
    if busy is not None:
        idle = max(0.0, wall - busy)
        rows += [("kernels", busy, "ms a step"), ("idle", idle, "ms a step")]
        line += f" · kernels {busy:.3f} ms ({share:.1%}), idle {idle:.3f} ms"
    listed = [
        {
            "name": one.name,
            "calls_per_step": round(one.calls / profiled.steps, 2),
            "ms_per_step": significant(1e3 * one.seconds / profiled.steps),
            "share": round(one.seconds / total, 4),
        }
        for one in longest[: settings.top]
    ]
    publish(
        figures_of("profile", vars(settings), *rows, images_per_second=speed, busy_share=share, operators=listed),
        settings.json,
        f"profile · {settings.recipe} · {settings.net} · batch {settings.batch_size} · {settings.precision}",
        ("operator" if on_cpu else "kernel", "calls a step", "ms a step", "share"),
        [(f"{name:.90}", f"{calls:g}", f"{ms:.4f}", f"{part:.1%}") for name, calls, ms, part in (one.values() for one in listed)],
        line,
        f"one profile of {settings.steps} steps after {settings.warmup + settings.steps}; operators' times are the profiler's",
    )


def _is_kernel(event: Any) -> bool:
    """Whether an event is work on a device other than the CPU, not the shadow of a named range."""
    return event.device_type != DeviceType.CPU and not getattr(event, "is_user_annotation", False)


def operators(averages: Iterable[Any], on_cpu: bool) -> list[Operator]:
    """What the profiler averaged, as operators with time of their own, the longest first."""
    time_of = "self_cpu_time_total" if on_cpu else "self_device_time_total"
    kept = [entry for entry in averages if on_cpu or _is_kernel(entry)]
    timed = [Operator(entry.key, entry.count, 1e-6 * getattr(entry, time_of)) for entry in kept]
    return sorted((one for one in timed if one.seconds > 0), key=lambda one: -one.seconds)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of what (start, end) spans cover together; kernels of two streams may run at once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


if __name__ == "__main__":
    raise SystemExit(run_script())
