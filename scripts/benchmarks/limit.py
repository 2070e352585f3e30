"""Compare training steps with the speed of this machine: python scripts/benchmarks/limit.py --data-dir DATA."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import product
from operator import truediv
from typing import Any, NamedTuple

import torch
from loops import AUTOCAST
from progress import Progress
from script import run_script
from timed_fit import Stopwatch, Subject, add_data_arguments, fit, read_clock, subject_from
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from cifar_lit.bench.report import Row, publish, spread
from cifar_lit.cli.flags import recipe_path
from cifar_lit.data.loaders import FitLength, count_batches
from cifar_lit.errors import UsageError
from cifar_lit.features.resolutions import Resolutions
from cifar_lit.features.skip_easy import first_hard_batch
from cifar_lit.runs.config_file import plain_values

WHAT = (
    "For each recipe and precision, compare the GFLOP/s of training steps under the Trainer with the GFLOP/s of a "
    "matrix product and of the net's convolutions alone (forward and backward), in the same precision. The three take "
    "turns in one process, at each image size of the training. The computation of a training is that of its forward "
    "and backward passes, as counted by FlopCounterMode; the optimizer is not counted."
)
RATES = ("matrix product", "convolutions", STEPS := "training steps")
MATRIX_SIDE = {"cpu": 2048, "cuda": 8192}  # rows and columns
PRODUCTS = 5  # matrix products for each training step
FEW_IMAGES = 2  # in a recorded step; batch norm needs two
aten = torch.ops.aten
# Number of leading arguments that have a batch dimension: the input, or the gradient of the output and the input.
CONVOLUTIONS = {aten.convolution.default: 1, aten.convolution_backward.default: 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    recipes = ["cpu91", "cpu92", "fast94"]
    parser.add_argument("--recipes", nargs="+", default=recipes, metavar="NAME", help="packaged recipes or YAML files")
    parser.add_argument("--precisions", nargs="+", default=list(AUTOCAST), choices=AUTOCAST, help="precisions")
    parser.add_argument("--steps", type=int, default=1, help="steps in a round; use 20 on a GPU")
    parser.add_argument("--rounds", type=int, default=3, help="rounds for each image size")
    add_data_arguments(parser)


def run(settings: argparse.Namespace) -> None:
    """Measure and report."""
    if min(settings.steps, settings.rounds) < 1:
        raise UsageError("--steps and --rounds must be at least 1")
    rows: dict[str, Row] = {}
    pairs = list(product(settings.recipes, settings.precisions))
    progress = Progress(len(pairs), "recipe and precision")
    for number, (recipe, precision) in enumerate(pairs):
        own = {"recipe": recipe, "net": None, "lr": None, "batch_size": None, "precision": precision}
        subject = subject_from(argparse.Namespace(**{**vars(settings), **own}))
        trainer: Any = plain_values(recipe_path(recipe))["trainer"]
        images = images_by_kind(subject, trainer["max_epochs"])
        steps = {kind: recorded_step(subject, kind) for kind in images}
        operations = {kind: images[kind] * step.operations for kind, step in steps.items()}
        most_frequent = {kind.side: kind for kind in sorted(images, key=lambda kind: images[kind])}
        rates = {side: measured_rates(subject, kind, steps[kind], settings) for side, kind in most_frequent.items()}
        total = (f"{recipe}: computation", sum(operations.values()) / 1e12, "TFLOP")
        for row in (total, *rate_rows(f"{recipe}, {precision}", operations, rates)):
            rows[row[0]] = row
        progress.advance(number + 1)
    title, turns = ", ".join(settings.recipes), "as many matrix products and runs of each convolution, in turn"
    line = f"{settings.rounds} rounds of {settings.steps} steps for each image size, and {turns}"
    publish("limit", vars(settings), title, list(rows.values()), line)


# ---- computation of a training


class Kind(NamedTuple):
    """A kind of training step: side of the images (None for full size), and `bias_is_final` of a whitened net."""

    side: int | None
    bias_is_final: bool


def images_by_kind(subject: Subject, epochs: int) -> Counter[Kind]:
    """Return the number of training images in steps of each kind, over a whole training."""
    data, bias_epochs = subject.data, subject.bias_epochs
    resolutions = Resolutions(subject.features.get("resolutions", {}).get("sides", {}))
    count, batch_size = len(data.split[0]), data.batch_size
    length = count_batches(count, batch_size)
    total = epochs * length
    first_hard = total  # from here on, all batches are full
    if "skip_easy" in subject.features:
        epoch, batch = first_hard_batch(subject.features["skip_easy"].get("start", 0.6), FitLength(length, total))
        first_hard = epoch * length + batch
    images: Counter[Kind] = Counter()
    for step in range(total):
        epoch, batch = divmod(step, length)
        kind = Kind(resolutions.side(epoch, epochs), step >= (bias_epochs or epochs) * length)
        images[kind] += batch_size if step >= first_hard else min(batch_size, count - batch * batch_size)
    return images


class RecordedStep(NamedTuple):
    """A training step: FLOP per image, FLOP per image in convolutions, and the convolutions with their arguments."""

    operations: float
    in_convolutions: float
    convolutions: Sequence[tuple[Any, Sequence[Any]]]

    def calls(self, batch_size: int, device: torch.device) -> Iterator[Callable[[], object]]:
        """Yield a function for each convolution, forward or backward, that computes it for a whole batch."""
        for operator, arguments in self.convolutions:
            batched = CONVOLUTIONS[operator]
            moved = [one.to(device) if isinstance(one, Tensor) else one for one in arguments]
            yield partial(operator, *(repeated(one, batch_size) for one in moved[:batched]), *moved[batched:])


class Recorder(TorchDispatchMode):
    """Record the convolutions and their gradients, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Sequence[Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in CONVOLUTIONS:
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def recorded_step(subject: Subject, kind: Kind) -> RecordedStep:
    """Return the computation of a kind of step, recorded on the CPU with a few images."""
    channels, height, width = subject.data.input_shape
    side = kind.side or height
    images = torch.randn(FEW_IMAGES, channels, side, round(width * side / height))
    net: Any = deepcopy(subject.model.net).train()
    net.is_prepared = True  # a first layer of random numbers takes as long as a computed one
    if kind.bias_is_final:
        net.bias_is_final = True
    with FlopCounterMode(display=False) as counter, Recorder() as recorder:
        with torch.autocast("cpu", torch.bfloat16, enabled=AUTOCAST[subject.trainer["precision"]]):
            logits = net(images.contiguous(memory_format=torch.channels_last))
        F.cross_entropy(logits, torch.zeros(FEW_IMAGES, dtype=torch.int64)).backward()
    counts = counter.get_flop_counts()["Global"]
    in_convolutions = sum(counts.get(operator.overloadpacket, 0) for operator in CONVOLUTIONS)
    if not in_convolutions:
        raise UsageError(f"{subject.model.hparams['net']} has no convolutions to compare with")
    return RecordedStep(counter.get_total_flops() / FEW_IMAGES, in_convolutions / FEW_IMAGES, recorder.calls)


def repeated(tensor: Tensor, count: int) -> Tensor:
    """Return the first image `count` times, in the memory format of `tensor`."""
    is_last = tensor.is_contiguous(memory_format=torch.channels_last)
    memory_format = torch.channels_last if is_last else torch.contiguous_format
    return tensor[:1].repeat(count, 1, 1, 1).contiguous(memory_format=memory_format)


# ---- speed


def measured_rates(
    subject: Subject, kind: Kind, step: RecordedStep, settings: argparse.Namespace
) -> Mapping[str, Sequence[float]]:
    """Train steps of a kind, and compute matrix products and convolutions in turn; return the FLOP/s of each round."""
    data = subject.data
    features = {name: values for name, values in subject.features.items() if name != "resolutions"}
    if kind.side is not None:
        features["resolutions"] = {"sides": {kind.side: 1.0}}
    if "whitening" in features:  # its bias ends in the warm-up, or never
        features["whitening"] = {"bias_epochs": 1e-9 if kind.bias_is_final else None}
    dtype = torch.bfloat16 if AUTOCAST[subject.trainer["precision"]] else torch.float32
    products: list[float] = []
    convolutions: list[float] = []

    def start(trainer: Any, model: Any) -> Callable[[int], None]:
        @torch.no_grad()
        def turn(steps: int) -> None:
            # The first turn warms up. With a whole batch, this would take seconds on a CPU.
            images = data.batch_size if products or model.device.type != "cpu" else FEW_IMAGES
            products.append(product_rate(dtype, model.device, steps))
            seconds = sum(seconds_of(call, model.device, steps) for call in step.calls(images, model.device))
            convolutions.append(images * step.in_convolutions / seconds)

        return turn

    watch = Stopwatch(settings.steps, settings.rounds, settings.steps, start)
    fit(subject._replace(features=features), watch)
    own = [turn.images * step.operations / turn.ours for turn in watch.rounds]
    return dict(zip(RATES, (products[1:], convolutions[1:], own), strict=True))


def product_rate(dtype: torch.dtype, device: torch.device, repeats: int) -> float:
    """Return the FLOP/s of products of two square matrices."""
    side = MATRIX_SIDE.get(device.type, 4096)
    first, second = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    return 2 * side**3 / seconds_of(lambda: first @ second, device, PRODUCTS * repeats)


def seconds_of(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the mean duration of a call in seconds."""
    before = read_clock(device)
    for _ in range(repeats):
        call()
    return (read_clock(device) - before) / repeats


def rate_rows(
    label: str, operations: Mapping[Kind, float], rates: Mapping[int | None, Mapping[str, Sequence[float]]]
) -> list[Row]:
    """Return the rates over a whole training, and the share of its rate in the other two, round by round.

    Args:
        label: recipe and precision.
        operations: FLOP of a training in steps of each kind.
        rates: the result of `measured_rates` for each side.
    """
    total = sum(operations.values())
    means = {  # the time of a training is the sum of the times of its kinds
        name: [
            total / sum(map(truediv, operations.values(), turn))
            for turn in zip(*(rates[kind.side][name] for kind in operations), strict=True)
        ]
        for name in RATES
    }
    speeds = [(f"{label}: {name}", spread(rate / 1e9 for rate in means[name]), "GFLOP/s") for name in RATES]
    shares = {
        name: spread(100 * own / other for own, other in zip(means[STEPS], means[name], strict=True))
        for name in RATES
        if name != STEPS
    }
    return [*speeds, *((f"{label}: share of the {name}", share, "%") for name, share in shares.items())]


if __name__ == "__main__":
    raise SystemExit(run_script())
