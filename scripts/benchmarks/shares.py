"""Where the time of a training step goes on a CPU: python scripts/benchmarks/shares.py --recipe cpu91."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from report import publish
from timed_fit import fit_with
from torch.profiler import ProfilerActivity, profile

WHAT = (
    "Profile training steps of a recipe with torch.profiler, and report the share of each kind of operation in their "
    "processor time, and the time of a step. A fixed side of the images: --resolutions.sides '{24: 0.99}', or "
    "--resolutions false."
)
# Kinds of operations by the begin of their names.
KINDS = {
    "convolutions": ("aten::mkldnn_convolution", "aten::convolution", "aten::conv", "aten::unfold", "aten::_slow_conv"),
    "pooling": ("aten::max_pool", "aten::amax", "aten::adaptive"),
    "activations": ("aten::gelu", "aten::silu", "aten::relu"),
    "norms": ("aten::native_batch_norm", "aten::batch_norm", "aten::_batch_norm"),
    "copies": ("aten::copy_", "aten::to", "aten::_to_copy", "aten::contiguous", "aten::clone", "aten::cat"),
    "matrix products": ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"),
}


class Profile(Callback):
    """Profile steps of a fit, after a warm-up; then end the fit.

    Attributes:
        latest: the callback of the latest fit.
        times: processor time by the name of an operation, without those that it calls.
        steps: number of profiled steps.
        warmup: number of steps before.
    """

    latest: ClassVar[Profile]

    def __init__(self, steps: int, warmup: int) -> None:
        Profile.latest = self
        self.steps, self.warmup = steps, warmup
        self.times: Counter[str] = Counter()
        self.description: dict[str, object] = {}
        self._profiler = profile(activities=[ProfilerActivity.CPU])

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Start after the warm-up, and end after the steps."""
        if trainer.global_step == self.warmup:
            self.description = {"batch_size": trainer.datamodule.batch_size, "precision": str(trainer.precision)}  # type: ignore[attr-defined]
            self._profiler.start()
        if trainer.global_step == self.warmup + self.steps:
            self._profiler.stop()
            self.times = Counter({each.key: each.self_cpu_time_total for each in self._profiler.key_averages()})
            trainer.should_stop = True


def run(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=WHAT, epilog="All other flags are those of `cifar-lit fit`.")
    parser.add_argument("--steps", type=int, default=40, help="profiled steps")
    parser.add_argument("--warmup", type=int, default=10, help="steps before")
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    settings, words = parser.parse_known_args(argv)
    fit_with(words, "shares.Profile", steps=settings.steps, warmup=settings.warmup)
    measured = Profile.latest
    total = sum(measured.times.values())
    rows = [(kind, 100 * share_of(measured.times, names) / total, "%") for kind, names in KINDS.items()]
    rows.append(("a step", total / measured.steps / 1e3, "ms"))
    publish("shares", {**vars(settings), **measured.description, "flags": words}, rows)


def share_of(times: Counter[str], names: Sequence[str]) -> float:
    """Return the time of all operations whose names begin with one of `names`."""
    return sum(time for name, time in times.items() if name.startswith(tuple(names)))


if __name__ == "__main__":
    import shares  # the module that the command line imports, not __main__

    shares.run()
