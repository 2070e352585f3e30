"""The images of the data set that a run was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.shapes import MIN_SIZE, shapes
from cifar_lit.data.sources import SourceSettings, at_hand, load_images
from cifar_lit.errors import Failure, UsageError
from cifar_lit.runs.config_file import plain_values
from cifar_lit.runs.model_file import ModelCard
from cifar_lit.runs.run_folder import display_path

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData


def run_image_data(run: Path, card: ModelCard, dataset: str | None = None, data_dir: str | None = None) -> ImageData:
    """The data that a run trained and tested on, with its split; downloaded where they are missing.

    Args:
        card: Of the run's model; the data must be of its classes and of its images' shape.
        dataset: Another data set than config.yaml names, needed where there is none.
        data_dir: Where it lies, if not where it was.

    Raises:
        UsageError: Nothing says which data.
        Failure: They are not those that the net was trained for.
    """
    from cifar_lit.data.datamodule import ImageData  # here, as it imports Lightning

    if dataset:
        settings: dict[str, Any] = {"dataset": dataset}
        if dataset in ("shapes", "folder"):
            settings |= {"image_size": card.input_shape[1], "channels": card.input_shape[0]}
        if dataset == "shapes":
            settings["num_classes"] = len(card.classes)
    elif not (settings := _data_settings(run)):
        raise UsageError(
            f"{display_path(run)} has no config.yaml that names the data: give --dataset, and --data-dir where they lie"
        )
    try:
        data = ImageData(**{**settings, **({"root": data_dir} if data_dir else {})})
    except TypeError as error:
        config = display_path(run / "config.yaml")
        raise Failure(f"{config} has data settings of another version ({error}): give --dataset") from None
    if data.classes != tuple(card.classes):
        counts = "; ".join(
            f"{len(names)}: {', '.join(names[:3])}{', …' * (len(names) > 3)}" for names in (data.classes, card.classes)
        )
        raise Failure(f"the data have other classes than the net ({counts}): name its own with --dataset and --data-dir")
    if data.input_shape != card.input_shape:
        own, other = _shape_text(data.input_shape), _shape_text(card.input_shape)
        raise Failure(f"the data are images of {own}, the net takes {other}: name its own with --dataset and --data-dir")
    return data


def _data_settings(run: Path) -> dict[str, Any]:
    """The data settings of a run's config.yaml, none where there is none."""
    file = run / "config.yaml"
    values = plain_values(file) if file.is_file() else None
    data = values.get("data") if isinstance(values, dict) else None
    return data if isinstance(data, dict) else {}


def _classes_text(classes: Sequence[str]) -> str:
    return f"{len(classes)}: {', '.join(classes[:3])}{', …' if len(classes) > 3 else ''}"


def _shape_text(shape: list[int]) -> str:
    return "×".join(map(str, shape))


class RunImages(NamedTuple):
    """Images as a net takes them: uint8 (N, C, H, W). labels: int64 (N,), None for drawn ones. what: they are, for the user."""

    images: Tensor
    labels: Tensor | None
    what: str


class RunData:
    """The data set of a run as far as it is here: nothing is downloaded.

    Args:
        model: The run's model.safetensors, beside its config.yaml.
        card: What it says; images that it does not fit are not used.
        data_dir: Where the images are, if not where config.yaml says; without config.yaml, a folder of images.
    """

    def __init__(self, model: Path, card: ModelCard, data_dir: str | None = None) -> None:
        self.card, self.data_dir = card, data_dir
        values = _data_settings(model.parent)
        self.dataset = str(values.get("dataset", "folder"))
        known = {field.name for field in fields(SourceSettings)}
        self.settings = SourceSettings(**{name: value for name, value in values.items() if name in known})
        if data_dir is not None:
            self.settings = replace(self.settings, root=data_dir)
        if not values and card.input_shape[1] == card.input_shape[2]:
            self.settings = replace(self.settings, image_size=card.input_shape[1], channels=card.input_shape[0])

    def load(self, train: bool, count: int) -> RunImages:
        """`count` of the train or the test images, evenly spread over them; all for 0.

        Raises:
            UsageError, Failure: They are not to be had or do not fit the net.
        """
        where = f" {self.settings.root}" if self.settings.root else ""
        if not at_hand(self.dataset, self.settings):
            where = where and f" in{where}"
            raise Failure(
                f"the images of {self.dataset} that it was trained on are not here{where}: name their place with --data-dir"
            )
        source = load_images(self.dataset, self.settings, train)
        self._check(source)
        total = len(source)
        places = torch.arange(total) if not count or count >= total else torch.arange(count) * total // count
        where = where if self.dataset == "folder" else ""
        what = f"{len(places):,} {'training' if train else 'test'} images of {self.dataset}{where}"
        return RunImages(source.images[places].permute(0, 3, 1, 2).contiguous(), source.labels[places], what)

    def load_or_draw(self, count: int) -> RunImages:
        """Test images as `load` gives them; where there are none, drawn figures, and in `what` the reason.

        Raises:
            UsageError, Failure: The images' place was named, and they are not to be had there.
        """
        try:
            return self.load(train=False, count=count)
        except (UsageError, Failure) as error:
            if self.data_dir is not None:
                raise
            drawn = _drawn(self.card.input_shape, count or 1000)
            return RunImages(drawn, None, f"{len(drawn):,} drawn images, without labels ({error})")

    def _check(self, source: ImageSet) -> None:
        shape = [source.channels, source.height, source.width]
        if shape != self.card.input_shape:
            sizes = f"{_shape_text(shape)}, not {_shape_text(self.card.input_shape)}"
            raise Failure(f"the images of {self.dataset} are {sizes} as the net takes: name others with --data-dir")
        if list(source.classes) != self.card.classes:
            raise Failure(f"the classes of {self.dataset} are not those of the net: name its images with --data-dir")


def _drawn(input_shape: list[int], count: int) -> Tensor:
    """Drawn figures, uint8 (count, C, H, W), grey in all channels where a net has neither 1 nor 3."""
    channels, height, width = input_shape
    drawn = shapes(False, image_size=max(MIN_SIZE, height, width), channels=3 if channels == 3 else 1, count=count)
    images = drawn.images[:, :height, :width].permute(0, 3, 1, 2)
    return images.expand(-1, channels, -1, -1).contiguous()
