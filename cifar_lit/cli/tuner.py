"""`--auto-batch` and `--auto-lr`: find the largest batch size that fits, and a learning rate, before the training.

Lightning's Tuner (2.6) is not used. `scale_batch_size` raises the batch size until a step runs out of memory; a CPU
swaps or kills the process before that. `lr_find` gives all parameter groups the same rate; ours differ up to a
thousandfold. It also uses the loss of the current batch: for small batches, noise hides the effect of the rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
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
from cifar_lit.training.optimizers import build_optimizer

SIZES = [2**power for power in range(4, 13)]  # above 4,096, images/s no longer rises and accuracy falls
RATES = ("lr", "bias_lr", "head_lr", "input_lr")  # model settings that the range test scales by one factor
PEAK = 2.0  # times the bytes saved for the backward pass: a high estimate of the peak
RESERVE = 0.1  # fraction of the free memory left for other use
MIN_EPOCH_STEPS = 20  # steps per epoch that the batch size must allow
MIN_STEPS, MAX_STEPS = 60, 300  # steps of the range test
MAX_IMAGES = 20_000  # images of the range test, unless MIN_STEPS need more
MIN_FACTOR, MAX_FACTOR = 1e-3, 1e2  # range of the test, relative to the configured rate
PROBE_IMAGES = 512  # fixed images whose loss is computed after every step
WINDOW = 0.25  # decades of the rate to either side over which the fall of the loss is measured
MIN_FALL = 0.02  # fraction of the first loss; a smaller fall is noise
BLOWN_UP = 4.0  # times the lowest loss; a higher loss ends the test
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def device_of(machine: Machine, accelerator: str, devices: Any, nodes: int) -> torch.device:
    """Return the device that the Trainer will use; raise UsageError for more than one."""
    if count_devices(machine, accelerator, devices) * nodes > 1:
        raise UsageError("--auto-batch and --auto-lr need one device: search with --devices 1, then set the values")
    by_id = isinstance(devices, list) and machine.kind(accelerator) == "gpu"
    return torch.device(resolve_device(f"cuda:{devices[0]}" if by_id else accelerator, machine))


class Trial:
    """Training steps of a copy of the model, in float32 unless the precision is mixed."""

    def __init__(self, model: ImageClassifier, data: ImageData, device: torch.device, precision: str) -> None:
        self.device, self.smoothing = device, model.hparams["label_smoothing"]
        self.net = deepcopy(model.net).to(device).train()
        if model.hparams["fixed_norms"]:
            freeze_norms(self.net)
        if isinstance(self.net, WhitenedNet):
            self.net.initialise(images_to_whiten(data).to(device))
            self.net.whitened.fill_(True)
        settings = {name: model.hparams[name] for name in GROUP_SETTINGS}
        self.optimizer: Optimizer = build_optimizer(self.net, precision=precision, **settings)
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "16-mixed")
        self.autocast = torch.autocast(device.type, AUTOCAST.get(precision), enabled=precision in AUTOCAST)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of images, float (B, C, H, W), with labels, int64 (B,)."""
        with self.autocast:
            logits = self.net(images.to(self.device))
        return F.cross_entropy(logits.float(), labels.to(self.device), label_smoothing=self.smoothing)

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Take one optimizer step."""
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(self.loss(images, labels)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def largest_batch(trial: Trial, shape: list[int], limit: int, placed: Callable[[int], int] = lambda free: 0) -> int:
    """Return the largest of SIZES that fits into memory and is at most `limit`; raise Failure if none fits.

    On a GPU, larger steps are run until one runs out of memory. On a CPU, the memory is estimated from the tensors that
    a small batch saves for the backward pass.

    Args:
        shape: (C, H, W) of an image.
        placed: returns how many of a GPU's free bytes the training images will occupy.
    """
    sizes = [SIZES[0], *(size for size in SIZES[1:] if size <= limit)]
    if trial.device.type == "cuda":
        free = torch.cuda.mem_get_info(trial.device)[0]
        reserved = int(free * RESERVE) + placed(free)
        if reserved >= free:
            raise Failure("the images leave no memory for a step: set --data.placement host")
        reserve = torch.empty(reserved, dtype=torch.uint8, device=trial.device)
        fitting = list(takewhile(lambda size: _fits(trial, shape, size), sizes))
        del reserve
        torch.cuda.empty_cache()  # cached memory does not count as free when images are placed
    else:
        with trial.autocast:
            bytes_per_image = PEAK * saved_bytes(trial.net, shape, SIZES[0]) / SIZES[0]
        memory = (1 - RESERVE) * (free_memory(trial.device) or 4 << 30)
        fitting = [size for size in sizes if size * bytes_per_image < memory]
    if not fitting:
        raise Failure(f"{SIZES[0]} images do not fit into {trial.device.type} memory: choose a smaller --net")
    return fitting[-1]


def saved_bytes(net: nn.Module, shape: Sequence[int], size: int) -> int:
    """Return the bytes that autograd saves for the backward pass of `size` images, without weights."""
    weights = {weight.untyped_storage().data_ptr() for weight in net.parameters()}
    saved: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage  # kept, so that its address is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        F.cross_entropy(net(torch.zeros(size, *shape)), torch.zeros(size, dtype=torch.int64))
    return sum(storage.nbytes() for storage in saved.values())


def bytes_on_device(data: ImageData, free: int) -> int:
    """Return the bytes that the training images will occupy on a device with `free` bytes."""
    images = data.train_images
    return images.images.nbytes if data.placement.place_of(images, free) == "device" else 0


def _fits(trial: Trial, shape: list[int], size: int) -> bool:
    try:
        for _ in range(2):  # the first step allocates the optimizer's state
            trial.step(torch.zeros(size, *shape), torch.zeros(size, dtype=torch.int64))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        trial.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
    return True


def learning_rate(trial: Trial, images: Tensor, labels: Tensor, batch: int, lr: float) -> float:
    """Return a learning rate from a range test (L. N. Smith, Cyclical Learning Rates, 2017, section 3.3).

    Every step multiplies the rates of all groups by the same factor. The result is the rate at which the loss falls
    fastest over the logarithm of the rate, as in fast.ai.

    Args:
        images: float (N, C, H, W), normalised.
        labels: int64 (N,).
        batch: images per step.
        lr: the configured rate; the test starts at MIN_FACTOR times its value.

    Raises:
        Failure: the loss does not fall clearly at any rate.
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
        if not losses[-1] <= BLOWN_UP * min(losses):  # also for NaN
            break
    reach = max(1, round(WINDOW * steps / math.log10(MAX_FACTOR / MIN_FACTOR)))
    best = steepest([loss for loss in losses if math.isfinite(loss)], reach)
    if best is None:
        tested = f"{lr * MIN_FACTOR:.2g} … {lr * MAX_FACTOR:.2g}"
        raise Failure(f"no learning rate in {tested} lowers the loss clearly in {steps} steps: set --lr")
    return float(f"{lr * factors[best]:.2g}")


def steepest(losses: list[float], reach: int) -> int | None:
    """Return the index where losses fall fastest before their minimum, None if the fall is noise.

    The fall is measured from `reach` indices before to `reach` after.
    """
    if not losses or min(losses) > (1 - MIN_FALL) * losses[0]:
        return None
    lowest = losses.index(min(losses))
    falls = {step: losses[step - reach] - losses[step + reach] for step in range(reach, lowest - reach + 1)}
    return max(falls, key=falls.__getitem__, default=None)


def search(auto: set[str], model: ImageClassifier, data: ImageData, device: torch.device, precision: str) -> None:
    """Set the batch size of `data` ("batch" in auto) and the learning rates of `model` ("lr"), and print them."""
    count, lr = len(data.split[0]), model.hparams["lr"]
    if "batch" in auto:
        limit = count // MIN_EPOCH_STEPS
        trial = Trial(model, data, device, precision)
        size = largest_batch(trial, data.input_shape, limit, partial(bytes_on_device, data))
        say(f"--auto-batch: {size} images (configured: {data.batch_size})")
        data.batch_size = size
    if "lr" in auto:
        room = MAX_FLOATS // math.prod(data.input_shape)  # the test repeats images beyond this number
        count = min(count, max(MIN_STEPS * data.batch_size, MAX_IMAGES), max(PROBE_IMAGES, room))
        rows = spread_rows(data.split[0], count)
        images, labels = data.plain_images(count), data.train_images.labels[rows]
        rate = learning_rate(Trial(model, data, device, precision), images, labels, data.batch_size, lr)
        say(f"--auto-lr: {rate:g} (configured: {lr:g}), where the loss falls fastest; all rates are scaled alike")
        for name in RATES:
            if (value := model.hparams[name]) is not None:
                model.hparams[name] = float(f"{value * rate / lr:.2g}")
