"""Load the images that a run was trained and tested on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cifar_lit.base.errors import Failure, UsageError
from cifar_lit.base.files import display_path
from cifar_lit.base.settings import plain_values
from cifar_lit.base.text import listed, nfc, note_once, quoted
from cifar_lit.base.trust import check_name
from cifar_lit.data.image_set import ImageSet, label_names
from cifar_lit.inference.model_file import ModelCard

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData


def run_image_data(run: Path, card: ModelCard, data_dir: str | None = None, all_classes: bool = False) -> ImageData:
    """Return the data of a run with its split, downloaded if missing.

    Args:
        data_dir: folder of the data, if it was moved.
        all_classes: keep the images of classes that were added since the training.

    Raises:
        UsageError: the run has no config.yaml.
        Failure: classes or image size differ from those of the net.
    """
    from cifar_lit.data.datamodule import ImageData  # imports Lightning

    if not (run / "config.yaml").is_file():
        raise UsageError(f"{display_path(run)} has no config.yaml that names the data: name the folder of the run")
    settings: dict[str, Any] = plain_values(run / "config.yaml").get("data", {})
    check_name(str(settings.get("dataset")))
    if data_dir:
        settings["root"] = data_dir
    if settings.get("dataset") == "folder" and card.levels:
        settings["images"] = {**settings.get("images", {}), "levels": list(card.levels)}
    data = ImageData(**settings)
    _fit_to_net(run, card, data, all_classes)
    return data


def _fit_to_net(run: Path, card: ModelCard, data: ImageData, all_classes: bool) -> None:
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
    """Return the NFC names of the images that have no other classes than these."""
    own = [label_names(label, images.classes) for label in images.labels]
    return [nfc(name) for name, names in zip(images.names, own, strict=True) if {*map(nfc, names)} <= {*classes}]
