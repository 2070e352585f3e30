"""Where the time of a recipe's training step goes: python scripts/benchmarks/profile_step.py --recipe laptop."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jsonargparse import ArgumentParser, Namespace
from script import run_script
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from cifar_lit.bench.report import environment, headline, publish, settings_of, significant
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


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of this measurement."""
    add_training_arguments(parser, recipe="tudui")
    parser.add_argument("--warmup", type=int, default=20, help="steps before anything is measured")
    parser.add_argument("--steps", type=int, default=50, help="steps that are timed, and then steps that are profiled")
    parser.add_argument("--top", type=int, default=12, help="how many operators are listed")


def run(settings: Namespace) -> None:
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
    wall = timed.seconds / timed.steps
    busy = None if on_cpu else 1e-6 * covered(spans) / profiled.steps  # the profiler counts in microseconds
    report(settings, figures_of(settings, wall, busy, longest, profiled.steps, timed.images / timed.seconds))


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


def figures_of(
    settings: Namespace, wall: float, busy: float | None, longest: Sequence[Operator], steps: int, speed: float
) -> dict[str, Any]:
    """The figures: wall and kernel seconds a step (`busy` None on a CPU), and the operators of `steps` profiled steps."""
    total = sum(one.seconds for one in longest)
    rows: list[tuple[str, float, str]] = [("wall", 1e3 * wall, "ms a step")]
    if busy is not None:
        rows += [("kernels", 1e3 * busy, "ms a step"), ("idle", 1e3 * max(0.0, wall - busy), "ms a step")]
    return {
        "bench": "profile",
        "settings": settings_of(settings),
        "environment": environment(),
        **headline(*rows),
        "images_per_second": significant(speed),
        "busy_share": None if busy is None else round(min(1.0, busy / wall), 4),
        "operators": [
            {
                "name": one.name,
                "calls_per_step": round(one.calls / steps, 2),
                "ms_per_step": significant(1e3 * one.seconds / steps),
                "share": round(one.seconds / total, 4),
            }
            for one in longest[: settings.top]
        ],
    }


def report(settings: Namespace, figures: dict[str, Any]) -> None:
    """Prints the figures, and writes them to a file if one is named."""
    times, share = figures["headline"], figures["busy_share"]
    line = f"{times['wall']:.3f} ms a step without the profiler · {figures['images_per_second']:,.0f} images/s"
    if share is not None:
        line += f" · kernels {times['kernels']:.3f} ms ({share:.1%}), idle {times['idle']:.3f} ms"
    publish(
        figures,
        settings.json,
        f"profile · {settings.recipe} · {settings.net} · batch {settings.batch_size} · {settings.precision}",
        ("operator" if share is None else "kernel", "calls a step", "ms a step", "share"),
        [
            (one["name"][:90], f"{one['calls_per_step']:g}", f"{one['ms_per_step']:.4f}", f"{one['share']:.1%}")
            for one in figures["operators"]
        ],
        line,
        f"one profile of {settings.steps} steps after {settings.warmup + settings.steps}; operators' times are the profiler's",
    )


if __name__ == "__main__":
    raise SystemExit(run_script(sys.modules[__name__]))
