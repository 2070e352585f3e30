"""`cifar-lit preview PHOTOS`: a sheet of one's own images, as they are and as epochs of a training would show them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jsonargparse import Namespace
from PIL import Image
from torchvision.utils import make_grid

from cifar_lit.cli.errors import command_parser, parsed
from cifar_lit.cli.fit import follow_pretraining
from cifar_lit.cli.flags import recipe_path
from cifar_lit.data.augment import Augmentation
from cifar_lit.data.cache import COMMON_SIZE, MAX_OWN_SIZE
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.decode import decode, image_size
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.image_size import parse_image_size
from cifar_lit.errors import UsageError, nearest
from cifar_lit.inference.classify import ImageFile, find_images, is_picture_name, save_picture
from cifar_lit.runs.config_file import plain_values
from cifar_lit.runs.figures import augmented_sample, captioned
from cifar_lit.runs.run_folder import display_path
from cifar_lit.text import counted, note, say

DESCRIPTION = (
    "Draws a contact sheet of your own images: a row for each, first the original, then the image as the first epochs of a "
    "training augment it. Below each stands the name of its folder, which is its class. Takes the data settings of a recipe "
    "and --data.x flags, such as --data.augment.brightness 0.4."
)
ROWS, EPOCHS = 12, 7
LEAST_SIDE = 96  # pixels of an image on the sheet; smaller ones are enlarged by a whole number


def preview(argv: list[str]) -> None:
    """Writes the sheet; raises UsageError for settings that cannot be meant, Failure for files that cannot be read or written."""
    settings = _settings(argv)
    files = list(find_images(settings.paths, sys.stdin.buffer))
    if not files:
        raise UsageError("there are no images among what is to be previewed")
    chosen = files[:: -(-len(files) // ROWS)]
    out = Path(settings.out).expanduser()
    _check_target(out, files)
    data = _data(settings.data.as_dict(), chosen)
    count = len(chosen)
    plain = data.train_images.images.permute(0, 3, 1, 2)
    columns = torch.stack([plain, *(augmented_sample(data, count, epoch) for epoch in range(EPOCHS))], dim=1).flatten(
        0, 1
    )
    times = -(-LEAST_SIDE // min(plain.shape[2:]))
    images = columns.repeat_interleave(times, 2).repeat_interleave(times, 3)
    ways = ["original", *(f"augmented ({epoch})" for epoch in range(EPOCHS))]
    captions = [(Path(file.path).absolute().parent.name, way) for file in chosen for way in ways]
    tiles = [captioned(image, lines) for image, lines in zip(images, captions, strict=True)]
    sheet = make_grid(tiles, len(ways), padding=4, pad_value=255)
    save_picture(Image.fromarray(sheet.permute(1, 2, 0).numpy()), out)
    if data.augmentation == Augmentation() and data.device_augmentation is None:
        note("nothing is augmented by these settings: name a recipe, as in --recipe finetune, or set --data.augment.x")
    of = f"{count} of {len(files):,} images" if count < len(files) else counted(count, "image")
    say(f"{of}, as they are and in epochs 0 … {EPOCHS - 1}: {display_path(out)}")


def _settings(argv: list[str]) -> Namespace:
    """The flags, over the data settings of the recipe if one is named."""
    parser = command_parser("preview", DESCRIPTION)
    add = parser.add_argument
    add("paths", type=str, nargs="*", metavar="PHOTOS", help="files, folders, patterns such as '*.jpg' or '**/*.png'")
    add("--recipe", type=str | None, default=None, help="a packaged recipe, or a YAML file of your own")
    add("--out", type=str, default="preview.png", metavar="FILE.png", help="where the sheet is written")
    parser.add_class_arguments(ImageData, "data")
    settings = parsed(parser, argv)
    if not settings.paths:
        raise UsageError("preview what? Name files, folders or patterns of your own images.")
    model: dict[str, Any] = {}
    if settings.recipe:
        whole: dict[str, Any] = plain_values(recipe_path(settings.recipe)) or {}
        recipe, model = whole.get("data") or {}, whole.get("model") or {}
        for name in recipe:
            if name not in settings.data:
                raise UsageError(f"no setting is called data.{name}.{nearest(str(name), settings.data.keys())}")
        parser.set_defaults({f"data.{name}": value for name, value in recipe.items()})
        settings = parsed(parser, argv)
    settings.data.dataset = "folder"
    follow_pretraining(model.get("net", ""), model.get("weights"), settings.data)
    return settings


def _check_target(out: Path, files: Sequence[ImageFile]) -> None:
    """Refuses to write into what is no picture, or over one of the images."""
    if not is_picture_name(out):
        raise UsageError(f"--out {out}: name a picture, such as preview.png")
    if out.is_file() and any(Path(file.path).is_file() and out.samefile(file.path) for file in files):
        raise UsageError(f"--out {out} is among the images: choose another file")


def _data(settings: dict[str, Any], files: Sequence[ImageFile]) -> ImageData:
    """The images of some files as a data set to train on, in their order and of the size that a training has them in."""
    for file in files:
        if file.error or not os.path.exists(file.path):
            raise UsageError(f"{file.path}: {file.error or 'there is no such file'}")
    chosen, paths = settings["image_size"], [file.path for file in files]
    sizes = {image_size(path) for path in paths} if chosen is None else {parse_image_size(chosen)}
    size = sizes.pop()
    if sizes or (chosen is None and max(size) > MAX_OWN_SIZE):  # as `folder` has it
        size = (COMMON_SIZE, COMMON_SIZE)
    data = ImageData(**{**settings, "shuffle": False, "sampling": "none", "placement": "device"})
    pixels = np.stack([decode(path, size, settings["channels"] or 3, settings["resize"]) for path in paths])
    data.parts.train_images = ImageSet(torch.from_numpy(pixels), torch.zeros(len(files), dtype=torch.int64), ("photo",))
    data.parts.split = torch.arange(len(files)), torch.arange(0)
    return data
