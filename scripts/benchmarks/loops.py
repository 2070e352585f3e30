"""Hand-written training loops to compare with. Each yields after every step or epoch."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import lightning.pytorch as pl
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.transforms import Compose, Normalize, ToTensor

from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.loaders import Batch
from cifar_lit.errors import UsageError
from cifar_lit.signals import STOP_SIGNALS
from cifar_lit.training.classifier import ImageClassifier

AUTOCAST = {"32-true": False, "bf16-mixed": True}  # precisions of the bare loop


def leave_signals(worker: int) -> None:
    """Ignore Ctrl-C and a closed terminal, which also reach workers: the main process ends them."""
    for number in STOP_SIGNALS:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)


class ArrayImages(Dataset[tuple[Tensor, int]]):
    """Images as in torchvision's data sets: an array (H, W, C), or (H, W) for one channel, transformed on access."""

    def __init__(self, images: ImageSet, transforms: Sequence[Callable[[Any], Any]]) -> None:
        arrays = images.images.numpy()
        self.arrays: Any = arrays if arrays.shape[3] > 1 else arrays[..., 0]
        self.labels, self.transform = images.labels.tolist(), Compose(transforms)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.arrays[index]), self.labels[index]


def lay_out_plainly(net: nn.Module) -> None:
    """Restore the default memory format of a net's weights, as the tutorials have it."""
    for parameter in net.parameters():
        parameter.data = parameter.data.contiguous(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class TutorialLoop:
    """The loop of the five tutorials: PIL images, a DataLoader without workers, float32, SGD.

    Attributes:
        split: rows of `images` for training and for evaluation.
        mean, std: statistics per channel for normalisation after ToTensor.
    """

    images: ImageSet
    split: tuple[Tensor, Tensor]
    net: nn.Module
    batch_size: int
    lr: float
    momentum: float = 0.0
    mean: Sequence[float] = (0.0,)
    std: Sequence[float] = (1.0,)

    def _loader(self, rows: Tensor, shuffle: bool) -> DataLoader[tuple[Tensor, int]]:
        plain = not any(self.mean) and all(value == 1 for value in self.std)
        transforms = [Image.fromarray, ToTensor(), *([] if plain else [Normalize(self.mean, self.std)])]
        images = Subset(ArrayImages(self.images, transforms), rows.tolist())
        return DataLoader(images, batch_size=self.batch_size, shuffle=shuffle)

    def steps(self, device: torch.device) -> Iterator[int]:
        """Train; yield the number of images after each step."""
        loader, net = self._loader(self.split[0], True), self.net.to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=self.lr, momentum=self.momentum)
        while True:
            net.train()
            for pixels, labels in loader:
                pixels, labels = pixels.to(device), labels.to(device)
                loss = F.cross_entropy(net(pixels), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                yield len(labels)

    def epochs(self, device: torch.device) -> Iterator[int]:
        """Train and evaluate; yield the number of training images after each epoch."""
        steps, held_out = self.steps(device), self._loader(self.split[1], False)
        while True:
            trained = sum(islice(steps, -(-len(self.split[0]) // self.batch_size)))
            self.net.eval()
            loss_sum, hits = 0.0, 0
            with torch.no_grad():
                for pixels, labels in held_out:
                    logits, labels = self.net(pixels.to(device)), labels.to(device)
                    loss_sum += F.cross_entropy(logits, labels).item()
                    hits += int((logits.argmax(1) == labels).sum())
            yield trained


def batches_on_device(data: ImageData, device: torch.device) -> Iterator[Iterator[Batch]]:
    """Yield epochs of normalised batches on the device, as the Trainer passes them to the model."""
    data = copy(data)  # creates a loader of its own for the same images
    loader: Any = data.train_dataloader()
    for epoch in count():
        loader.set_epoch(epoch)
        yield (data.on_after_batch_transfer(data.transfer_batch_to_device(batch, device, 0), 0) for batch in loader)


class BareLoop:
    """The shortest loop that computes a model's training steps: the baseline for the overhead of the Trainer.

    Net, batches, precision, optimizer, schedule and weight average are copied from the model on construction.

    Attributes:
        net: the copy that is trained.
        average: average of its weights, if the model's settings ask for one.

    Raises:
        UsageError: if the precision is unsupported or the model has class weights.
    """

    def __init__(self, trainer: pl.Trainer, model: ImageClassifier, data: ImageData) -> None:
        if model.hparams["class_weights"] != "none":
            raise UsageError("the bare loop has no class weights: choose a --recipe without model.class_weights")
        if trainer.precision not in AUTOCAST:
            raise UsageError(
                f"the bare loop has no precision {trainer.precision}: set --precision to {' or '.join(AUTOCAST)}"
            )
        twin = ImageClassifier(**model.hparams).to(model.device)  # the optimizer's kernels depend on the device
        self.net = twin.net = deepcopy(model.net)
        twin.train()
        if model.hparams["compile"]:
            self.net.compile(dynamic=False)
        twin.trainer = trainer  # gives the schedule the length of the training
        configured: Any = twin.configure_optimizers()
        if not isinstance(configured, dict):  # a constant rate
            configured = {"optimizer": configured, "lr_scheduler": {"scheduler": None, "interval": ""}}
        self.optimizer, self.schedule = configured["optimizer"], configured["lr_scheduler"]
        decay = model.hparams["ema_decay"]
        self.average = (
            AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True) if decay else None
        )
        epochs = batches_on_device(data, model.device)
        self._running = self._steps(epochs, AUTOCAST[trainer.precision], model.hparams["label_smoothing"])

    def take(self, count: int) -> int:
        """Train that many steps; return the number of images."""
        return sum(islice(self._running, count))

    def _steps(self, epochs: Iterator[Iterator[Batch]], autocast: bool, smoothing: float) -> Iterator[int]:
        net, optimizer, average = self.net, self.optimizer, self.average
        scheduler, interval = self.schedule["scheduler"], self.schedule["interval"]
        for epoch in epochs:
            for batch in epoch:
                images, labels = batch
                targets = labels if batch.targets is None else batch.targets
                optimizer.zero_grad(set_to_none=True)
                with torch.autocast(images.device.type, torch.bfloat16, enabled=autocast):
                    loss = F.cross_entropy(net(images), targets, label_smoothing=smoothing)
                loss.backward()
                optimizer.step()
                if interval == "step":
                    scheduler.step()
                if average:
                    average.update_parameters(net)
                yield len(labels)
            if interval == "epoch":
                scheduler.step()
            if interval:  # only nets with whitening read the attribute
                net.bias_is_final = scheduler.whitening_ended
