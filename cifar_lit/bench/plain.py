"""The loops that people write by hand, to be compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import ToTensor

from cifar_lit.data.imageset import ImageSet
from cifar_lit.data.module import ImageData


class PilImages(Dataset[tuple[Tensor, int]]):
    """Images as torchvision's data sets give them: a PIL image made from an array at each access, then ToTensor."""

    def __init__(self, images: ImageSet) -> None:
        self.arrays, self.labels = images.images.numpy(), images.labels.tolist()
        self.transform = ToTensor()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        array = self.arrays[index]
        return self.transform(Image.fromarray(array if array.shape[2] == 3 else array[:, :, 0])), self.labels[index]


def tutorial_loop(images: ImageSet, net: nn.Module, batch_size: int, lr: float, shuffle: bool) -> Callable[[], None]:
    """The loop of the five tutorials, a step at each call: PIL images, a DataLoader without workers, float32, SGD."""
    loader = DataLoader(PilImages(images), batch_size=batch_size, shuffle=shuffle)
    batches = _forever(lambda: iter(loader))
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    loss_function = nn.CrossEntropyLoss()

    def step() -> None:
        pixels, labels = next(batches)
        loss = loss_function(net(pixels), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def bare_loop(data: ImageData, net: nn.Module, lr: float, precision: str) -> Callable[[], None]:
    """The shortest loop over the same batches as ours, in the same precision: what a Trainer adds is added to this."""
    loader = data.train_dataloader()
    batches = _forever(lambda: iter(loader))
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)

    def step() -> None:
        batch = data.on_after_batch_transfer(next(batches), 0)
        optimizer.zero_grad()
        with torch.autocast(batch.images.device.type, torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = F.cross_entropy(net(batch.images), batch.labels)
        loss.backward()
        optimizer.step()

    return step


def _forever(make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    while True:
        yield from make()
