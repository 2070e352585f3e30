"""The images of the data set that a run was trained on, where they still are, without downloading any."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.shapes import MIN_SIZE, shapes
from cifar_lit.data.sources import SourceSettings, at_hand, load_images
from cifar_lit.errors import Failure, UsageError
from cifar_lit.runs.config_file import plain_values
from cifar_lit.runs.model_file import ModelCard


class RunImages(NamedTuple):
    """Images as a net takes them: uint8 (N, C, H, W). labels: int64 (N,), None for drawn ones. what: they are, for the user."""

    images: Tensor
    labels: Tensor | None
    what: str


class RunData:
    """The data set of a run, as its config.yaml says, or as the folder `data_dir` if there is no config.yaml.

    model: the run's model.safetensors. card: what it says; images that it does not fit are not used.
    """

    def __init__(self, model: Path, card: ModelCard, data_dir: str | None = None) -> None:
        self.card, self.given = card, data_dir
        found = _data_settings(model.parent / "config.yaml")
        self.dataset = str(found.get("dataset", "folder"))
        known = {field.name for field in fields(SourceSettings)}
        self.settings = SourceSettings(**{name: value for name, value in found.items() if name in known})
        if data_dir is not None:
            self.settings = replace(self.settings, root=data_dir)
        if not found and card.input_shape[1] == card.input_shape[2]:
            self.settings = replace(self.settings, image_size=card.input_shape[1], channels=card.input_shape[0])

    def load(self, train: bool, count: int) -> RunImages:
        """`count` of the train or the test images, evenly spread over them; all for 0.

        Raises UsageError or Failure where they are not to be had or do not fit the net.
        """
        if not at_hand(self.dataset, self.settings):
            where = f" in {self.settings.root}" if self.settings.root else ""
            raise Failure(
                f"the images of {self.dataset} that it was trained on are not here{where}: name their place with --data-dir"
            )
        source = load_images(self.dataset, self.settings, train)
        self._check(source)
        total = len(source)
        places = torch.arange(total) if not count or count >= total else torch.arange(count) * total // count
        where = f" {self.settings.root}" if self.settings.root and self.dataset == "folder" else ""
        what = f"{len(places):,} {'training' if train else 'test'} images of {self.dataset}{where}"
        return RunImages(source.images[places].permute(0, 3, 1, 2).contiguous(), source.labels[places], what)

    def load_or_draw(self, count: int) -> RunImages:
        """Test images as `load` gives them; where there are none, drawn figures, and in `what` the reason.

        Raises UsageError or Failure instead where the images' place was named.
        """
        try:
            return self.load(train=False, count=count)
        except (UsageError, Failure) as error:
            if self.given is not None:
                raise
            drawn = _drawn(self.card.input_shape, count or 1000)
            return RunImages(drawn, None, f"{len(drawn):,} drawn images, without labels ({error})")

    def _check(self, source: ImageSet) -> None:
        shape = [source.channels, source.height, source.width]
        if shape != self.card.input_shape:
            given, wanted = ("×".join(map(str, sizes)) for sizes in (shape, self.card.input_shape))
            raise Failure(f"the images of {self.dataset} are {given}, not {wanted} as the net takes: name others with --data-dir")
        if list(source.classes) != self.card.classes:
            raise Failure(f"the classes of {self.dataset} are not those of the net: name its images with --data-dir")


def _data_settings(file: Path) -> dict[str, Any]:
    """The data settings of a config.yaml, none where there is none."""
    if not file.is_file():
        return {}
    found = plain_values(file)
    data = found.get("data") if isinstance(found, dict) else None
    return data if isinstance(data, dict) else {}


def _drawn(input_shape: list[int], count: int) -> Tensor:
    """Drawn figures, uint8 (count, C, H, W), grey in all channels where a net has neither 1 nor 3."""
    channels, height, width = input_shape
    drawn = shapes(False, image_size=max(MIN_SIZE, height, width), channels=3 if channels == 3 else 1, count=count)
    images = drawn.images[:, :height, :width].permute(0, 3, 1, 2)
    return images.expand(-1, channels, -1, -1).contiguous()
