"""Load the images that a run was trained and tested on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cifar_lit.base.errors import Failure, UsageError
from cifar_lit.base.files import display_path
from cifar_lit.base.settings import plain_values
from cifar_lit.base.text import listed, nfc, note_once, quoted
from cifar_lit.base.trust import check_name
from cifar_lit.data.image_set import ImageSet, spread_rows
from cifar_lit.data.sources import find_source
from cifar_lit.inference.logits import NetImages
from cifar_lit.inference.model_file import ModelCard

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData


def data_settings(run: Path, card: ModelCard, dataset: str | None, data_dir: str | None) -> dict[str, Any]:
    """Return the data settings of a run's config.yaml, or those of `dataset` for this net; empty if both are missing.

    dataset: data set to use instead of that in config.yaml, required without a config.yaml.
    data_dir: folder of the data, if it was moved.
    """
    settings: dict[str, Any] = {}
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
        settings["images"] = {**settings.get("images", {}), "levels": list(card.levels)}
    return settings


def _settings_for(dataset: str, card: ModelCard) -> dict[str, Any]:
    images: dict[str, object] = {}
    if dataset in ("shapes", "folder"):
        images = card.preparation.settings()
    if dataset == "shapes":
        images["num_classes"] = len(card.classes)
    return {"dataset": dataset, "val_size": 0, "images": images}  # the split is unknown


def run_image_data(
    run: Path, card: ModelCard, dataset: str | None = None, data_dir: str | None = None, all_classes: bool = False
) -> ImageData:
    """Return the data of a run with its split, downloaded if missing. Arguments are those of `data_settings`.

    all_classes: keep the images of classes that were added since the training.

    Raises:
        UsageError: the data set is unknown.
        Failure: classes or image size differ from those of the net.
    """
    data = _open(run, card, dataset, data_dir)
    _fit_to_net(run, card, data, all_classes)
    return data


def _open(run: Path, card: ModelCard, dataset: str | None, data_dir: str | None) -> ImageData:
    """Return the data of a run, before any image is loaded."""
    from cifar_lit.data.datamodule import ImageData  # imports Lightning

    settings = data_settings(run, card, dataset, data_dir)
    if not settings:
        raise UsageError(
            f"{display_path(run)} has no config.yaml that names the data: add --dataset, and --data-dir with its folder"
        )
    return ImageData(**settings)


def _fit_to_net(run: Path, card: ModelCard, data: ImageData, all_classes: bool = False) -> None:
    """Leave out images of classes that the net does not know. Raise Failure if the data do not fit the net."""
    remedy = "give the folder of its own data with --data-dir"
    classes, shape = data.classes, data.input_shape
    known = [*map(nfc, card.classes)]
    new = [name for name in classes if nfc(name) not in known]
    if new and data.train_images.names and [nfc(name) for name in classes if name not in new] == known:
        place = display_path(run)
        again = ("--config", f"{place}/config.yaml", "--weights", place, "--data-dir", str(data.settings.root))
        fault = f"{place} does not know {listed(new)}, whose images are not used here"
        note_once(f"{fault}. To learn: cifar-lit train {quoted(*again)}")
        if not all_classes:
            data.keep_images(_names_of(data.train_images, known) + _names_of(data.test_images, known))
    elif [*map(nfc, classes)] != known:
        data_classes = f"{len(classes)}: {listed(classes)}"
        net_classes = f"{len(card.classes)}: {listed(card.classes)}"
        raise Failure(f"the data has other classes ({data_classes}) than the net ({net_classes}): {remedy}")
    if shape != card.input_shape:
        data_shape, net_shape = "×".join(map(str, shape)), "×".join(map(str, card.input_shape))
        raise Failure(f"the images are {data_shape}, but the net takes {net_shape}: {remedy}")


def _names_of(images: ImageSet, classes: Sequence[str]) -> list[str]:
    """Return the NFC names of the images of some classes."""
    names = []
    for name, label in zip(images.names, images.labels.tolist(), strict=True):
        if nfc(images.classes[label]) in classes:
            names.append(nfc(name))
    return names


def run_images(run: Path, card: ModelCard, data_dir: str | None, train: bool, count: int) -> NetImages:
    """Return `count` training or test images of a run, evenly spaced; all for 0. Nothing is downloaded.

    data_dir: folder of the images, if they were moved; without a config.yaml, an image folder.
    Raise UsageError or Failure if the images are missing or do not fit the net.
    """
    dataset = None if (run / "config.yaml").is_file() else "folder"
    data = _open(run, card, dataset, data_dir)
    if not find_source(data.dataset).at_hand(data.settings):
        where = f" in {data.settings.root}" if data.settings.root else ""
        raise Failure(f"the images of {data.dataset} are missing{where}: give their folder with --data-dir")
    _fit_to_net(run, card, data)
    images, rows, what = data.test_images, torch.arange(len(data.test_images)), "test"
    if train:
        images, rows, what = data.train_images, data.split[0], "training"
    rows = spread_rows(rows, count or len(rows))
    what = f"{len(rows):,} {what} images of {data.dataset}"
    if data.dataset == "folder":
        what = f"{what} {data.settings.root}"
    return NetImages(images.take(rows).permute(0, 3, 1, 2).contiguous(), images.labels[rows], what)


def run_or_drawn_images(run: Path, card: ModelCard, data_dir: str | None, count: int) -> NetImages:
    """Return test images, or random images if there are none, with the reason in `what`.

    With `data_dir`, the error of `run_images` is raised instead.
    """
    try:
        return run_images(run, card, data_dir, train=False, count=count)
    except (UsageError, Failure) as error:
        if data_dir is not None:
            raise
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(256, (count or 1000, *card.input_shape), dtype=torch.uint8, generator=generator)
        return NetImages(images, None, f"{len(images):,} generated images without labels ({error})")
