"""`--auto-batch` and `--auto-lr`: the largest batch that fits, and a learning rate, found before the training starts.

Lightning's Tuner cannot do it here: its searches count on automatic optimization, and on one batch a training step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from cifar_lit.data.datamodule import ImageData
from cifar_lit.errors import Failure, UsageError
from cifar_lit.hardware import Machine, count_devices, resolve_device
from cifar_lit.models.whitened import WhitenedNet
from cifar_lit.training.classifier import ImageClassifier
from cifar_lit.training.initialise import IMAGES
from cifar_lit.training.optimizers import GROUP_SETTINGS, build_optimizer

SMALLEST, LARGEST = 16, 4096  # images; above that no device of ours takes less time for an image, and accuracy falls
RESERVE = 0.1  # of the free memory that is kept for the images themselves and what else comes
LEAST_STEPS = 20  # an epoch keeps at least so many, as far as SMALLEST allows
MOST_IMAGES = 20_000  # of the range test, at most, but for its fewest steps
FEWEST_STEPS, MOST_STEPS = 60, 300  # of the range test
LOWEST, HIGHEST = 1e-3, 1e2  # times the configured rate
PROBE = 512  # images that the loss is taken on: always the same ones, or a small batch's chance would hide its fall
WINDOW = 0.25  # decades of the rate over which a fall is measured, to either side
CLEAR = 0.02  # of the first loss, that it must fall by in all: less is chance
BLOWN_UP = 4.0  # times the lowest loss: the test ends


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch had no memory, on whatever device."""
    return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and "allocate memory" in str(error))


def device_of(machine: Machine, accelerator: str, devices: Any) -> torch.device:
    """The one device that the Trainer would take; raises UsageError for several."""
    if count_devices(machine, accelerator, devices) > 1:
        raise UsageError("--auto-batch and --auto-lr look on one device: find the values with --devices 1, then give them")
    name = f"cuda:{devices[0]}" if isinstance(devices, list) else accelerator
    return torch.device(resolve_device(name, machine))


class Trial:
    """Steps of a copy of a model, which is as it was afterwards.

    precision: the Trainer's; mixed ones compute under autocast. Other ones are tried as float32, which takes no less memory.
    """

    def __init__(self, model: ImageClassifier, data: ImageData, device: torch.device, precision: str) -> None:
        self.device, self.smoothing = device, model.hparams["label_smoothing"]
        self.net = deepcopy(model.net).to(device).train()
        if isinstance(self.net, WhitenedNet):
            self.net.initialise(data.plain_images(IMAGES).to(device))
            self.net.whitened.fill_(True)
        h = model.hparams
        settings = {name: h[name] for name in GROUP_SETTINGS if name not in ("optimizer", "lr")}
        products = "float32" if device.type == "cpu" and "bf16" not in precision else "bfloat16"
        self.optimizer: Optimizer = build_optimizer(self.net, h["optimizer"], h["lr"], **settings, products=products)
        kinds = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
        self.autocast: Callable[[], AbstractContextManager] = nullcontext
        if precision in kinds:
            self.autocast = lambda: torch.autocast(device.type, kinds[precision])

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of a batch on the device."""
        with self.autocast():
            return F.cross_entropy(self.net(images).float(), labels, label_smoothing=self.smoothing)

    def step(self, images: Tensor, labels: Tensor) -> float:
        """One optimizer step; returns the loss before it."""
        loss = self.loss(images.to(self.device), labels.to(self.device))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def largest_batch(trial: Trial, shape: list[int], most: int) -> int:
    """The largest power of two, from SMALLEST to the lesser of `most` and LARGEST, of images (C, H, W) that a step takes.

    A GPU is tried until it refuses; of a CPU, which would first swap and then kill, the memory is reckoned from what a small
    batch keeps for the way back. Raises Failure when not even the smallest fits.
    """
    sizes = [
        2**power for power in range(int(math.log2(SMALLEST)), int(math.log2(LARGEST)) + 1) if 2**power <= max(most, SMALLEST)
    ]
    if trial.device.type == "cuda":
        fitting = list(_tried(trial, shape, sizes))
    else:
        each = 2 * _kept_bytes(trial, shape, SMALLEST) / SMALLEST  # gradients take about as much again
        fitting = [size for size in sizes if size * each < (1 - RESERVE) * available_memory()]
    if not fitting:
        raise Failure(f"not even {SMALLEST} images fit into the memory of {trial.device.type}: choose a smaller --net")
    return fitting[-1]


def _tried(trial: Trial, shape: list[int], sizes: list[int]) -> Iterator[int]:
    free, _ = torch.cuda.mem_get_info(trial.device)
    reserve = torch.empty(int(free * RESERVE), dtype=torch.uint8, device=trial.device)
    for size in sizes:
        try:
            for _ in range(2):  # the first step makes the optimizer's own tensors
                trial.step(torch.zeros(size, *shape), torch.zeros(size, dtype=torch.int64))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return
        finally:
            trial.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
        yield size
    del reserve


def _kept_bytes(trial: Trial, shape: list[int], size: int) -> int:
    """Bytes that autograd keeps between the way there and the way back, weights not counted."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in trial.net.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        trial.loss(
            torch.zeros(size, *shape, device=trial.device), torch.zeros(size, dtype=torch.int64, device=trial.device)
        ).backward()
    trial.optimizer.zero_grad(set_to_none=True)
    return sum(kept.values())


def available_memory() -> int:
    """Bytes that programs can still get, as Linux reckons; 4 GiB where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 4 << 30
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 4 << 30)


def learning_rate(trial: Trial, images: Tensor, labels: Tensor, batch: int, lr: float) -> float:
    """A learning rate by a range test (L. N. Smith 2017, Cyclical Learning Rates for Training Neural Networks, section 3.3).

    The rate rises from LOWEST to HIGHEST times `lr`, by the same factor each step; of the loss over the logarithm of the rate,
    the place where it falls fastest is taken, as fast.ai and Lightning do. images: float (N, C, H, W), normalised; labels
    int64 (N,). Raises Failure when the loss does not fall clearly at any rate.
    """
    base = [float(group["lr"]) for group in trial.optimizer.param_groups]
    steps = min(max(FEWEST_STEPS, len(images) // batch), MOST_STEPS)
    factors = torch.logspace(math.log10(LOWEST), math.log10(HIGHEST), steps).tolist()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    probe, expected = images[order[:PROBE]].to(trial.device), labels[order[:PROBE]].to(trial.device)
    losses: list[float] = []
    for step, factor in enumerate(factors):
        for group, rate in zip(trial.optimizer.param_groups, base, strict=True):
            group["lr"] = rate * factor
        rows = order[torch.arange(step * batch, (step + 1) * batch) % len(order)]
        trial.step(images[rows], labels[rows])
        with torch.no_grad():
            losses.append(float(trial.loss(probe, expected)))
        if not losses[-1] <= BLOWN_UP * min(losses):  # nor when it is not a number
            break
    reach = max(1, round(WINDOW * steps / math.log10(HIGHEST / LOWEST)))
    found = steepest([loss for loss in losses if math.isfinite(loss)], reach)
    if found is None:
        tried = f"no learning rate from {lr * LOWEST:.2g} to {lr * HIGHEST:.2g} lowers the loss clearly in {steps} steps"
        raise Failure(f"{tried}: choose --lr by hand")
    return float(f"{lr * factors[found]:.2g}")


def steepest(losses: list[float], reach: int) -> int | None:
    """Where losses fall fastest before their lowest, measured from `reach` places before to as many after.

    None where they do not fall clearly, by CLEAR of the first at least.
    """
    if not losses or min(losses) > (1 - CLEAR) * losses[0]:
        return None
    lowest = losses.index(min(losses))
    falls = {place: losses[place - reach] - losses[place + reach] for place in range(reach, lowest - reach + 1)}
    return max(falls, key=falls.__getitem__, default=None)


def search(auto: set[str], model: ImageClassifier, data: ImageData, device: torch.device, precision: str) -> None:
    """Sets the batch size of `data` ("batch" in auto) and the rate of `model` ("lr") to what is found, and says so."""
    images_here, before = len(data.split[0]), model.hparams["lr"]
    if "batch" in auto:
        with memory_told(data):
            found = largest_batch(Trial(model, data, device, precision), data.input_shape, images_here // LEAST_STEPS)
        print(f"--auto-batch: {found} images ({data.batch_size} were set); --lr stays {before:g}", flush=True)
        data.batch_size = found
    if "lr" in auto:
        count = min(images_here, max(FEWEST_STEPS * data.batch_size, MOST_IMAGES))
        images, labels = data.plain_images(count), data.train_images.labels[data.split[0][:count]]
        with memory_told(data):
            found_rate = learning_rate(Trial(model, data, device, precision), images, labels, data.batch_size, before)
        model.hparams["lr"] = found_rate
        print(f"--auto-lr: {found_rate:g} ({before:g} was set), where the loss falls fastest", flush=True)


@contextmanager
def memory_told(data: ImageData) -> Iterator[None]:
    """Turns torch's want of memory into a Failure that names the batch sizes and what to try."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        sizes = f"{data.batch_size} images in training and {data.eval_batch_size} in evaluation"
        raise Failure(
            f"out of memory with batches of {sizes}: halve --batch-size, let --auto-batch find the largest, lower "
            "--data.eval_batch_size, or choose a smaller --net"
        ) from error
