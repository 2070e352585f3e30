"""Load the images that a run was trained and tested on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jsonargparse import ArgumentError, ArgumentParser
from torch import Tensor

from cifar_lit.data.augment import Augment
from cifar_lit.data.image_set import spread_rows
from cifar_lit.data.shapes import MIN_SIZE, shapes
from cifar_lit.data.sources import SourceSettings, find_source, load_images
from cifar_lit.data.splits import Split
from cifar_lit.errors import Failure, UsageError, first_line
from cifar_lit.runs.config_file import plain_values
from cifar_lit.runs.model_file import ModelCard
from cifar_lit.runs.run_folder import display_path
from cifar_lit.text import listed, nfc
from cifar_lit.trust import check_name

NESTED = {"split": Split.of, "augment": Augment.of}  # groups of settings of ImageData

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData


def data_settings(run: Path, card: ModelCard, dataset: str | None, data_dir: str | None) -> dict[str, object]:
    """Return the data settings of a run's config.yaml, or those of `dataset` for this net; empty if both are missing.

    dataset: data set to use instead of that in config.yaml, required without a config.yaml.
    data_dir: folder of the data, if it was moved.
    """
    settings: dict[str, object] = {}
    if dataset:
        settings = _settings_for(dataset, card)
    elif (run / "config.yaml").is_file():
        settings.update(plain_values(run / "config.yaml").get("data", {}))
        check_name(str(settings.get("dataset")))
    if not settings:
        return {}
    if data_dir:
        settings["root"] = data_dir
    if settings.get("dataset") == "folder" and card.levels:
        settings["levels"] = list(card.levels)
    return settings


def _settings_for(dataset: str, card: ModelCard) -> dict[str, object]:
    settings: dict[str, object] = {"dataset": dataset, "val_size": 0}  # the split is unknown
    channels, height, width = card.input_shape
    if dataset in ("shapes", "folder"):
        settings |= {"image_size": [height, width], "channels": channels}
    if dataset == "folder":
        settings["resize"] = card.resize
    if dataset == "shapes":
        settings["num_classes"] = len(card.classes)
    return settings


def run_image_data(run: Path, card: ModelCard, dataset: str | None = None, data_dir: str | None = None) -> ImageData:
    """Return the data of a run with its split, downloaded if missing. Arguments are those of `data_settings`.

    Raises:
        UsageError: the data set is unknown.
        Failure: classes or image size differ from those of the net.
    """
    from cifar_lit.data.datamodule import ImageData  # imports Lightning

    settings = data_settings(run, card, dataset, data_dir)
    name = display_path(run)
    if not settings:
        raise UsageError(
            f"{name} has no config.yaml that names the data: add --dataset, and --data-dir with its folder"
        )
    data = ImageData(**_parsed(ImageData, settings, name))
    _check_fit(card, data.classes, data.input_shape)
    return data


def _parsed(kind: type, settings: dict[str, Any], name: str) -> dict[str, Any]:
    """Return settings converted to the argument types of a class; raise Failure for unknown or invalid ones.

    The parser does not get the groups of settings, because it would import a class named in them.
    """
    plain = dict(settings)
    nested = {}
    for group, of in NESTED.items():
        if group in plain:
            nested[group] = of(plain.pop(group))
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, as_group=False, skip=set(NESTED))
    try:
        return {**parser.parse_object(plain).as_dict(), **nested}
    except (ArgumentError, TypeError, ValueError) as error:  # TypeError: a name is not a string
        raise Failure(
            f"{name}/config.yaml has data settings of another version ({first_line(error)}): add --dataset"
        ) from None


def _check_fit(card: ModelCard, classes: Sequence[str], shape: list[int]) -> None:
    remedy = "give the folder of its own data with --data-dir"
    if [*map(nfc, classes)] != [*map(nfc, card.classes)]:
        data_classes = f"{len(classes)}: {listed(classes)}"
        net_classes = f"{len(card.classes)}: {listed(card.classes)}"
        raise Failure(f"the data has other classes ({data_classes}) than the net ({net_classes}): {remedy}")
    if shape != card.input_shape:
        data_shape, net_shape = "×".join(map(str, shape)), "×".join(map(str, card.input_shape))
        raise Failure(f"the images are {data_shape}, but the net takes {net_shape}: {remedy}")


class RunImages(NamedTuple):
    """Images in the format of a net's input."""

    images: Tensor  # uint8 (N, C, H, W)
    labels: Tensor | None  # int64 (N,); None for generated images
    what: str  # for messages


class RunData:
    """The data set of a run, without downloads.

    model: the run's model.safetensors, beside its config.yaml. Images that do not fit `card` are refused.
    data_dir: folder of the images, if they were moved; without a config.yaml, an image folder.
    """

    def __init__(self, model: Path, card: ModelCard, data_dir: str | None = None) -> None:
        self.card, self.data_dir = card, data_dir
        run = model.parent
        self.values = data_settings(run, card, None, data_dir)
        if not self.values:  # without a config.yaml
            self.values = data_settings(run, card, "folder", data_dir)
        self.dataset = str(self.values.get("dataset", "folder"))
        names = {field.name for field in fields(SourceSettings)} - {"groups"}  # needed for results only
        source = {name: value for name, value in self.values.items() if name in names}
        self.settings = SourceSettings(**_parsed(SourceSettings, source, display_path(run)))

    def load(self, train: bool, count: int) -> RunImages:
        """Return `count` training or test images, evenly spaced; all for 0.

        Raise UsageError or Failure if they are missing or do not fit the net.
        """
        self._check_at_hand()
        if self.settings.split.folds:  # a fold of the training images is the test set
            from cifar_lit.data.datamodule import ImageData  # imports Lightning

            data = ImageData(**_parsed(ImageData, self.values, self.dataset))
            source, rows = data.train_images, data.parts.fold_rows
            if train:
                rows = data.split[0]
        else:
            source = load_images(self.dataset, self.settings, train)
            rows = torch.arange(len(source))
            if train and source.val_rows is not None:  # these may be the test images too
                rows = rows[~torch.isin(rows, torch.tensor(source.val_rows))]
        _check_fit(self.card, source.classes, source.input_shape)
        places = spread_rows(rows, count or len(rows))
        what = f"{len(places):,} test images of {self.dataset}"
        if train:
            what = f"{len(places):,} training images of {self.dataset}"
        if self.dataset == "folder":
            what = f"{what} {self.settings.root or ''}".rstrip()
        return RunImages(source.take(places).permute(0, 3, 1, 2).contiguous(), source.labels[places], what)

    def parts(self) -> Iterator[Tensor]:
        """Yield all training, validation and test images in parts, uint8 (B, H, W, C). Raises the errors of `load`."""
        self._check_at_hand()
        for train in (True, False):
            images = load_images(self.dataset, self.settings, train)
            yield from map(images.take, torch.arange(len(images)).split(4096))

    def _check_at_hand(self) -> None:
        if not find_source(self.dataset).at_hand(self.settings):
            where = ""
            if self.settings.root:
                where = f" in {self.settings.root}"
            raise Failure(f"the images of {self.dataset} are missing{where}: give their folder with --data-dir")

    def load_or_draw(self, count: int) -> RunImages:
        """Return test images, or generated shapes if there are none, with the reason in `what`.

        Shapes are grey unless the net takes 3 channels. With `data_dir`, the error of `load` is raised instead.
        """
        try:
            return self.load(train=False, count=count)
        except (UsageError, Failure) as error:
            if self.data_dir is not None:
                raise
            channels, height, width = self.card.input_shape
            size = [max(MIN_SIZE, height), max(MIN_SIZE, width)]
            colours = 1
            if channels == 3:
                colours = 3
            drawn = shapes(False, image_size=size, channels=colours, count=count or 1000).images[:, :height, :width]
            images = drawn.permute(0, 3, 1, 2).expand(-1, channels, -1, -1).contiguous()
            return RunImages(images, None, f"{len(images):,} generated images without labels ({error})")
