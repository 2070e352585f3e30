"""The loops that people write by hand, which ours is compared with. Each yields after every step, or every epoch."""

from __future__ import annotations

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
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import Compose, Normalize, ToTensor

from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.loaders import Batch
from cifar_lit.errors import UsageError
from cifar_lit.training.classifier import ImageClassifier

AUTOCAST = {"32-true": False, "bf16-mixed": True}  # the precisions that the bare loop knows


class PilImages(Dataset[tuple[Tensor, int]]):
    """Images as torchvision's data sets give them: a PIL image made from an array at each access, then a transform.

    Args:
        images: all of a set.
        rows: int64, which of them and in which order, all if not given.
        transform: from the PIL image to a tensor (C, H, W); ToTensor if not given.
    """

    def __init__(self, images: ImageSet, rows: Tensor | None = None, transform: Callable[[Any], Tensor] | None = None) -> None:
        self.arrays, self.labels = images.images.numpy(), images.labels.tolist()
        self.rows = list(range(len(images))) if rows is None else rows.tolist()
        self.transform = transform or ToTensor()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        row = self.rows[index]
        array = self.arrays[row]
        return self.transform(Image.fromarray(array if array.shape[2] == 3 else array[:, :, 0])), self.labels[row]


class TensorImages(PilImages):
    """The same images as uint8 tensors (C, H, W), each sent through a transform at its access."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        row = self.rows[index]
        return self.transform(torch.from_numpy(self.arrays[row]).permute(2, 0, 1)), self.labels[row]


@dataclass(frozen=True)
class TutorialLoop:
    """The loop of the five tutorials: PIL images, a DataLoader without workers, float32, SGD.

    split: rows of `images` to train and to evaluate on. mean, std: of the channels, for normalisation after ToTensor.
    """

    images: ImageSet
    split: tuple[Tensor, Tensor]
    net: nn.Module
    batch_size: int
    lr: float
    momentum: float = 0.0
    mean: Sequence[float] = (0.0,)
    std: Sequence[float] = (1.0,)
    shuffle: bool = True

    def _loader(self, rows: Tensor, shuffle: bool) -> DataLoader[tuple[Tensor, int]]:
        plain = not any(self.mean) and all(value == 1 for value in self.std)
        transform = ToTensor() if plain else Compose([ToTensor(), Normalize(self.mean, self.std)])
        return DataLoader(PilImages(self.images, rows, transform), batch_size=self.batch_size, shuffle=shuffle)

    def steps(self, device: torch.device) -> Iterator[int]:
        """Trains, and yields after each step with the number of its images."""
        loader, net = self._loader(self.split[0], self.shuffle), self.net.to(device)
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
        """Trains, and yields after each epoch and the evaluation that ends it with the number of training images."""
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
    """Epoch after epoch, each as its batches on the device, normalised, as the Trainer feeds them to the model."""
    data = copy(data)  # with a loader of its own, over the same images
    loader: Any = data.train_dataloader()

    def epoch_of_batches() -> Iterator[Batch]:
        for loaded in loader:
            yield data.on_after_batch_transfer(data.transfer_batch_to_device(loaded, device, 0), 0)

    for epoch in count():
        loader.set_epoch(epoch)
        yield epoch_of_batches()


class BareLoop:
    """The shortest loop that does what a model's training steps do: what a Trainer adds is added to this.

    Net, batches, precision, optimizer, schedule and average are those of `model`, from its weights of this moment on,
    in copies of their own. net: the copy that is trained. loss: of the last step, a float tensor on the device.
    average: of the net's weights, where the model's settings ask for one.

    Raises:
        UsageError: a precision that it does not know.
    """

    def __init__(self, trainer: pl.Trainer, model: ImageClassifier, data: ImageData) -> None:
        if trainer.precision not in AUTOCAST:
            raise UsageError(f"the bare loop computes in {' or '.join(AUTOCAST)}, not in {trainer.precision}: set --precision")
        self.autocast = AUTOCAST[trainer.precision]
        self.data, self.device, self.settings = data, model.device, model.hparams
        twin = ImageClassifier(**model.hparams).to(model.device)  # the optimizer's kernels depend on the device
        self.net = twin.net = deepcopy(model.net).train()
        if self.settings["compile"]:
            self.net.compile()
        twin.trainer = trainer  # which tells the schedule how long the training is
        configured: Any = twin.configure_optimizers()
        if not isinstance(configured, dict):  # a constant rate
            configured = {"optimizer": configured, "lr_scheduler": {"scheduler": None, "interval": "step"}}
        self.optimizer = configured["optimizer"]
        self.schedule, self.every = configured["lr_scheduler"]["scheduler"], configured["lr_scheduler"]["interval"]
        self.loss = torch.zeros(())
        decay = self.settings["ema_decay"]
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True) if decay else None
        self._running = self.steps()

    def take(self, count: int) -> int:
        """Makes that many steps, and returns the images of all of them."""
        return sum(islice(self._running, count))

    def steps(self) -> Iterator[int]:
        """Trains, and yields after each step with the number of its images."""
        net, optimizer, schedule, average = self.net, self.optimizer, self.schedule, self.average
        smoothing = self.settings["label_smoothing"]
        for epoch in batches_on_device(self.data, self.device):
            for images, labels, *_ in epoch:
                optimizer.zero_grad(set_to_none=True)
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
                    loss = F.cross_entropy(net(images), labels, label_smoothing=smoothing)
                loss.backward()
                optimizer.step()
                if schedule and self.every == "step":
                    schedule.step()
                if average:
                    average.update_parameters(net)
                self.loss = loss.detach()
                yield len(labels)
            if schedule and self.every == "epoch":
                schedule.step()
