"""`--auto-batch` and `--auto-lr`: the largest batch that fits, and a learning rate, before the training starts.

Not Lightning's Tuner, as of 2.6: `scale_batch_size` enlarges the batch until a step runs out of memory, where a CPU has long
begun to swap or had the process killed; `lr_find` gives every parameter group one and the same rate, where ours may differ a
thousandfold, and judges it by the loss of the batch just trained on, whose chance hides the fall when batches are small.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from cifar_lit.cli.errors import is_out_of_memory
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.image_set import spread_rows
from cifar_lit.errors import Failure, UsageError
from cifar_lit.hardware import MAX_FLOATS, Machine, count_devices, free_memory, resolve_device
from cifar_lit.models.whitened import WhitenedNet
from cifar_lit.text import say
from cifar_lit.training.classifier import ImageClassifier
from cifar_lit.training.finetune import hold_norms
from cifar_lit.training.optimizers import GROUP_SETTINGS, build_optimizer
from cifar_lit.training.whitening import images_to_whiten

SIZES = [
    2**power for power in range(4, 13)
]  # of a batch: above 4,096 no device takes less time for an image, and accuracy falls
RATES = ("lr", "bias_lr", "head_lr", "input_lr")  # settings of a model that the range test changes by one factor
RESERVE = 0.1  # of the free memory, for what else comes
MIN_EPOCH_STEPS = 20  # that the largest batch leaves an epoch, where the smallest does
MIN_STEPS, MAX_STEPS = 60, 300  # of the range test
MAX_IMAGES = 20_000  # of the range test, but for its fewest steps
MIN_FACTOR, MAX_FACTOR = 1e-3, 1e2  # of the configured rate, between which it looks
PROBE_IMAGES = 512  # that the loss is taken on: the same ones after every step
WINDOW = 0.25  # decades of the rate over which a fall is measured, to either side
MIN_FALL = 0.02  # of the first loss, in all: less is chance
BLOWN_UP = 4.0  # times the lowest loss: the test ends
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def device_of(machine: Machine, accelerator: str, devices: Any, nodes: int) -> torch.device:
    """The one device that the Trainer would take; raises UsageError for several, also of several machines."""
    if count_devices(machine, accelerator, devices) * nodes > 1:
        raise UsageError(
            "--auto-batch and --auto-lr look on one device: find the values with --devices 1, then give them"
        )
    by_id = isinstance(devices, list) and machine.kind(accelerator) == "gpu"
    return torch.device(resolve_device(f"cuda:{devices[0]}" if by_id else accelerator, machine))


class Trial:
    """Steps of a copy of a model; of precisions but the mixed ones as float32, which takes no less memory."""

    def __init__(self, model: ImageClassifier, data: ImageData, device: torch.device, precision: str) -> None:
        self.device, self.smoothing = device, model.hparams["label_smoothing"]
        self.net = deepcopy(model.net).to(device).train()
        if model.hparams["fixed_norms"]:
            hold_norms(self.net)
        if isinstance(self.net, WhitenedNet):
            self.net.initialise(images_to_whiten(data).to(device))
            self.net.whitened.fill_(True)
        settings = {name: model.hparams[name] for name in GROUP_SETTINGS}
        self.optimizer: Optimizer = build_optimizer(self.net, precision=precision, **settings)
        self.autocast = torch.autocast(device.type, AUTOCAST.get(precision), enabled=precision in AUTOCAST)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of images, float (B, C, H, W), with labels, int64 (B,)."""
        with self.autocast:
            logits = self.net(images.to(self.device))
        return F.cross_entropy(logits.float(), labels.to(self.device), label_smoothing=self.smoothing)

    def step(self, images: Tensor, labels: Tensor) -> None:
        """One optimizer step."""
        self.optimizer.zero_grad(set_to_none=True)
        self.loss(images, labels).backward()
        self.optimizer.step()


def largest_batch(trial: Trial, shape: list[int], limit: int, placed: Callable[[int], int] = lambda free: 0) -> int:
    """The largest of SIZES, but for the smallest no larger than `limit`, whose images (C, H, W) a step has memory for.

    placed: given a GPU's free bytes, how many of them the training images will occupy.

    A GPU is tried until it refuses. Of a CPU the memory is reckoned from what a small batch keeps for the backward pass.
    Raises Failure when not even the smallest fits.
    """
    sizes = [SIZES[0], *(size for size in SIZES[1:] if size <= limit)]
    if trial.device.type == "cuda":
        free = torch.cuda.mem_get_info(trial.device)[0]
        wanted = int(free * RESERVE) + placed(free)
        if wanted >= free:
            raise Failure("the images leave no memory for a step: set --data.placement host")
        reserve = torch.empty(wanted, dtype=torch.uint8, device=trial.device)
        fitting = list(takewhile(lambda size: _fits(trial, shape, size), sizes))
        del reserve
        torch.cuda.empty_cache()  # what torch only keeps does not count as free where images are placed
    else:
        bytes_per_image = 2 * _kept_bytes(trial, shape, SIZES[0]) / SIZES[0]  # gradients take about as much again
        fitting = [
            size for size in sizes if size * bytes_per_image < (1 - RESERVE) * (free_memory(trial.device) or 4 << 30)
        ]
    if not fitting:
        raise Failure(f"not even {SIZES[0]} images fit into the memory of {trial.device.type}: choose a smaller --net")
    return fitting[-1]


def bytes_on_device(data: ImageData, free: int) -> int:
    """Return the bytes that training images will occupy on a device with so many free bytes."""
    images = data.train_images
    return images.images.nbytes if data.placement.place_of(images, free) == "device" else 0


def _fits(trial: Trial, shape: list[int], size: int) -> bool:
    try:
        for _ in range(2):  # the first step makes the optimizer's own tensors
            trial.step(torch.zeros(size, *shape), torch.zeros(size, dtype=torch.int64))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        trial.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
    return True


def _kept_bytes(trial: Trial, shape: list[int], size: int) -> int:
    """Bytes that autograd keeps between forward and backward pass, weights not counted."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in trial.net.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        trial.loss(torch.zeros(size, *shape), torch.zeros(size, dtype=torch.int64)).backward()
    trial.optimizer.zero_grad(set_to_none=True)
    return sum(kept.values())


def learning_rate(trial: Trial, images: Tensor, labels: Tensor, batch: int, lr: float) -> float:
    """A learning rate by a range test (L. N. Smith 2017, Cyclical Learning Rates for Training Neural Networks, section 3.3).

    All groups' rates rise by the same factor each step, of `batch` images, from MIN_FACTOR times what is configured, `lr`; where
    the loss falls fastest over the rate's logarithm is taken, as fast.ai does. images: float (N, C, H, W), normalised; labels:
    int64 (N,). Raises Failure when the loss does not fall clearly at any rate.
    """
    groups = [(group, float(group["lr"])) for group in trial.optimizer.param_groups]
    steps = min(max(MIN_STEPS, len(images) // batch), MAX_STEPS)
    factors = torch.logspace(math.log10(MIN_FACTOR), math.log10(MAX_FACTOR), steps).tolist()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    probe = order[:PROBE_IMAGES]
    losses: list[float] = []
    for step, factor in enumerate(factors):
        for group, rate in groups:
            group["lr"] = rate * factor
        rows = order[torch.arange(step * batch, (step + 1) * batch) % len(order)]
        trial.step(images[rows], labels[rows])
        with torch.no_grad():
            losses.append(float(trial.loss(images[probe], labels[probe])))
        if not losses[-1] <= BLOWN_UP * min(losses):  # nor when it is not a number
            break
    reach = max(1, round(WINDOW * steps / math.log10(MAX_FACTOR / MIN_FACTOR)))
    place = steepest([loss for loss in losses if math.isfinite(loss)], reach)
    if place is None:
        tried = f"no learning rate from {lr * MIN_FACTOR:.2g} to {lr * MAX_FACTOR:.2g} lowers the loss clearly in {steps} steps"
        raise Failure(f"{tried}: choose --lr by hand")
    return float(f"{lr * factors[place]:.2g}")


def steepest(losses: list[float], reach: int) -> int | None:
    """Where losses fall fastest before their lowest, from `reach` places before to as many after; None where it is by chance."""
    if not losses or min(losses) > (1 - MIN_FALL) * losses[0]:
        return None
    lowest = losses.index(min(losses))
    falls = {place: losses[place - reach] - losses[place + reach] for place in range(reach, lowest - reach + 1)}
    return max(falls, key=falls.__getitem__, default=None)


def search(auto: set[str], model: ImageClassifier, data: ImageData, device: torch.device, precision: str) -> None:
    """Sets the batch size of `data` ("batch" in auto) and the learning rates of `model` ("lr"), and prints them."""
    count, lr = len(data.split[0]), model.hparams["lr"]
    if "batch" in auto:
        limit = count // MIN_EPOCH_STEPS
        size = largest_batch(
            Trial(model, data, device, precision), data.input_shape, limit, partial(bytes_on_device, data)
        )
        say(f"--auto-batch: {size} images ({data.batch_size} were set)")
        data.batch_size = size
    if "lr" in auto:
        room = MAX_FLOATS // math.prod(data.input_shape)  # what is more than that comes several times
        count = min(count, max(MIN_STEPS * data.batch_size, MAX_IMAGES), max(PROBE_IMAGES, room))
        rows = spread_rows(data.split[0], count)
        images, labels = data.plain_images(count), data.train_images.labels[rows]
        rate = learning_rate(Trial(model, data, device, precision), images, labels, data.batch_size, lr)
        say(f"--auto-lr: {rate:g} ({lr:g} was set), where the loss falls fastest; all rates change by this factor")
        for name in RATES:
            if (value := model.hparams[name]) is not None:
                model.hparams[name] = float(f"{value * rate / lr:.2g}")
