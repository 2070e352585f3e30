"""The images of the data set that a run was trained on."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jsonargparse import ArgumentError, ArgumentParser
from torch import Tensor

from cifar_lit.data.image_set import spread_rows
from cifar_lit.data.shapes import MIN_SIZE, shapes
from cifar_lit.data.sources import SourceSettings, at_hand, load_images
from cifar_lit.errors import Failure, UsageError, first_line
from cifar_lit.plugins import allow_imports
from cifar_lit.runs.config_file import allow_choices, check_choices, plain_values
from cifar_lit.runs.model_file import ModelCard
from cifar_lit.runs.run_folder import display_path

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData


def data_settings(run: Path, card: ModelCard, dataset: str | None, data_dir: str | None) -> dict[str, Any]:
    """Settings of the data: those of a run's config.yaml, or what a named data set needs for the card's net; else none.

    Those of config.yaml are to be checked with `check_choices` before they are used.

    dataset: another than config.yaml names, needed where there is none. data_dir: where it lies, if not where it was.
    """
    if data_dir:
        allow_choices({"root": data_dir})
    if dataset:
        allow_imports([dataset])  # which was typed
        settings: Any = {"dataset": dataset, "val_size": 0}  # nobody knows which images were held out
        channels, height, width = card.input_shape
        if dataset in ("shapes", "folder"):
            settings |= {"image_size": [height, width], "channels": channels}
        if dataset == "folder":
            settings["resize"] = card.resize
        if dataset == "shapes":
            settings["num_classes"] = len(card.classes)
    else:
        config = plain_values(run / "config.yaml") if (run / "config.yaml").is_file() else None
        settings = config.get("data") if isinstance(config, dict) else None
    return {**settings, **({"root": data_dir} if data_dir else {})} if isinstance(settings, dict) and settings else {}


def run_image_data(run: Path, card: ModelCard, dataset: str | None = None, data_dir: str | None = None) -> ImageData:
    """The data that a run trained and tested on, with its split; downloaded where they are missing.

    Arguments are those of `data_settings`. Raises UsageError when nothing says which data, Failure when they are not those that
    the net was trained for.
    """
    from cifar_lit.data.datamodule import ImageData  # here, as it imports Lightning

    settings, name = data_settings(run, card, dataset, data_dir), display_path(run)
    if not settings:
        raise UsageError(
            f"{name} has no config.yaml that names the data: give --dataset, and --data-dir where they lie"
        )
    check_choices({"data": settings})
    data = ImageData(**_of_kinds(ImageData, settings, name))
    _check_fit(card, data.classes, data.input_shape)
    return data


def _of_kinds(kind: type, settings: dict[str, Any], name: str) -> dict[str, Any]:
    """What a class is made with, by settings of a config.yaml; raises Failure for unknown ones, and for values of other kinds."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, as_group=False)
    try:
        return dict(parser.parse_object(settings).as_dict())
    except (ArgumentError, TypeError, ValueError) as error:  # TypeError: of a name that is no text
        raise Failure(
            f"{name}/config.yaml has data settings of another version ({first_line(error)}): give --dataset"
        ) from None


def _check_fit(card: ModelCard, classes: tuple[str, ...], shape: list[int]) -> None:
    remedy = "name its own with --data-dir"
    if list(classes) != card.classes:
        own, other = (
            f"{len(names)}: {', '.join(names[:3])}{', …' * (len(names) > 3)}" for names in (classes, card.classes)
        )
        raise Failure(f"the data have other classes than the net ({own}; {other}): {remedy}")
    if shape != card.input_shape:
        own, other = ("×".join(map(str, sides)) for sides in (shape, card.input_shape))
        raise Failure(f"the data are images of {own}, the net takes {other}: {remedy}")


class RunImages(NamedTuple):
    """Images as a net takes them: uint8 (N, C, H, W). labels: int64 (N,), None for drawn ones. what: they are, for the user."""

    images: Tensor
    labels: Tensor | None
    what: str


class RunData:
    """The data set of a run as far as it is here: nothing is downloaded.

    model: the run's model.safetensors, beside its config.yaml. card: what it says; images that it does not fit are not used.
    data_dir: where the images are, if not where config.yaml says; without config.yaml, a folder of images.
    """

    def __init__(self, model: Path, card: ModelCard, data_dir: str | None = None) -> None:
        self.card, self.data_dir = card, data_dir
        run = model.parent
        self.values = data_settings(run, card, None, data_dir) or data_settings(run, card, "folder", data_dir)
        self.dataset = str(self.values.get("dataset", "folder"))
        known = {field.name for field in fields(SourceSettings)}
        own = {name: value for name, value in self.values.items() if name in known}
        self.settings = SourceSettings(**_of_kinds(SourceSettings, own, display_path(run)))

    def load(self, train: bool, count: int) -> RunImages:
        """`count` of the train or the test images, evenly spread over them; all for 0.

        Raises UsageError or Failure when they are not to be had or do not fit the net.
        """
        where = f" {self.settings.root}" if self.settings.root else ""
        if not at_hand(self.dataset, self.settings):
            place = f" in{where}" if where else ""
            raise Failure(
                f"the images of {self.dataset} that it was trained on are not here{place}: name their place with --data-dir"
            )
        check_choices({"data": self.values})
        if self.values.get("folds"):  # the test images are some of those to train on
            from cifar_lit.data.datamodule import ImageData  # here, as it imports Lightning

            data = ImageData(**_of_kinds(ImageData, self.values, self.dataset))
            source, rows = data.train_images, data.split[0] if train else data.parts.fold_rows
        else:
            source = load_images(self.dataset, self.settings, train)
            rows = torch.arange(len(source))
        _check_fit(self.card, source.classes, source.input_shape)
        places = spread_rows(rows, count or len(rows))
        which = "training" if train else "test"
        what = f"{len(places):,} {which} images of {self.dataset}{where if self.dataset == 'folder' else ''}"
        return RunImages(source.take(places).permute(0, 3, 1, 2).contiguous(), source.labels[places], what)

    def load_or_draw(self, count: int) -> RunImages:
        """Test images as `load` gives them; where there are none, drawn figures, and in `what` the reason.

        The figures are grey in all channels where a net has neither 1 nor 3. Raises what `load` does where `data_dir` was given.
        """
        try:
            return self.load(train=False, count=count)
        except (UsageError, Failure) as error:
            if self.data_dir is not None:
                raise
            channels, height, width = self.card.input_shape
            size, colours = [max(MIN_SIZE, height), max(MIN_SIZE, width)], 3 if channels == 3 else 1
            drawn = shapes(False, image_size=size, channels=colours, count=count or 1000).images[:, :height, :width]
            images = drawn.permute(0, 3, 1, 2).expand(-1, channels, -1, -1).contiguous()
            return RunImages(images, None, f"{len(images):,} drawn images, without labels ({error})")
