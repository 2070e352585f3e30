"""`cifar-lit preview IMAGES`: a contact sheet of augmented training images."""

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
from cifar_lit.cli.fit import adjust_to_features
from cifar_lit.cli.flags import inline_groups, recipe_path, recipe_settings
from cifar_lit.data.augment import Augment
from cifar_lit.data.cache import COMMON_SIZE, MAX_OWN_SIZE
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.decode import Preparation, common_levels, decode, image_size
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.source_settings import parse_image_size, parse_levels
from cifar_lit.errors import UsageError, nearest
from cifar_lit.features import FEATURES
from cifar_lit.inference.classify import ImageFile, find_images, is_picture_name, save_picture
from cifar_lit.runs.config_file import leaves
from cifar_lit.runs.figures import augmented_sample, captioned
from cifar_lit.runs.run_folder import display_path
from cifar_lit.text import counted, note, say

DESCRIPTION = (
    "Draw a contact sheet of your own images. Each row has the original and the image as augmented in the first "
    "epochs, with the name of its folder (its class). Takes the data settings of a recipe and --data.x flags, such as "
    "--data.augment.brightness 0.4."
)
ROWS = 12
EPOCHS = 7
MIN_SIDE = 96  # pixels on the sheet; smaller images are enlarged by a whole number


def preview(argv: list[str]) -> None:
    """Write the contact sheet."""
    settings = _settings(argv)
    files = list(find_images(settings.paths, sys.stdin.buffer))
    if not files:
        raise UsageError("no images found: give files, folders or patterns of your own images")
    sample = files[:: -(-len(files) // ROWS)]
    out = Path(settings.out).expanduser()
    _check_target(out, files)
    data = _data(settings.data.as_dict(), sample)
    count = len(sample)
    plain = data.train_images.images.permute(0, 3, 1, 2)
    columns = [plain, *(augmented_sample(data, count, epoch) for epoch in range(EPOCHS))]
    scale = -(-MIN_SIDE // min(plain.shape[2:]))
    images = torch.stack(columns, dim=1).flatten(0, 1).repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    headings = ["original", *(f"augmented ({epoch})" for epoch in range(EPOCHS))]
    captions = [(Path(file.path).absolute().parent.name, heading) for file in sample for heading in headings]
    tiles = [captioned(image, lines) for image, lines in zip(images, captions, strict=True)]
    sheet = make_grid(tiles, len(headings), padding=4, pad_value=255)
    save_picture(Image.fromarray(sheet.permute(1, 2, 0).numpy()), out)
    if data.augment == Augment():
        note("these settings do not augment: choose a recipe, such as --recipe finetune, or set --data.augment.x")
    drawn = f"{count} of {len(files):,} images" if count < len(files) else counted(count, "image")
    say(f"{drawn}, original and augmented in {EPOCHS} epochs: {display_path(out)}")


def _settings(argv: list[str]) -> Namespace:
    """Return the flags, with the data settings of the recipe as defaults."""
    parser = command_parser("preview", DESCRIPTION)
    add = parser.add_argument
    add("paths", type=str, nargs="*", metavar="IMAGES", help="files, folders, patterns such as '*.jpg' or '**/*.png'")
    add("--recipe", type=str | None, default=None, help="packaged recipe, or a YAML file of your own")
    add("--out", type=str, default="preview.png", metavar="FILE.png", help="file to write")
    parser.add_class_arguments(ImageData, "data")
    argv = inline_groups(argv)
    settings = parsed(parser, argv)
    if not settings.paths:
        raise UsageError("preview needs images: give files, folders or patterns of your own images")
    recipe: dict[str, Any] = {}
    if settings.recipe:
        recipe = recipe_settings(recipe_path(settings.recipe))
        defaults = recipe.get("data") or {}
        for name in [*defaults, *(".".join(key) for key, _ in leaves(defaults))]:
            if name not in settings.data:
                raise UsageError(f"no setting is called data.{name}.{nearest(str(name), settings.data.keys())}")
        parser.set_defaults({f"data.{name}": value for name, value in defaults.items()})
        settings = parsed(parser, argv)
    settings.data.dataset = "folder"
    features = {name: None if recipe.get(name) is None else Namespace(**recipe[name]) for name in FEATURES}
    net = (recipe.get("model") or {}).get("net", "")
    adjust_to_features(Namespace(**features, model=Namespace(net=net), data=settings.data))
    return settings


def _check_target(out: Path, files: Sequence[ImageFile]) -> None:
    """Raise UsageError if `out` is not an image file, or is one of the images."""
    if not is_picture_name(out):
        raise UsageError(f"--out {out}: give an image file, such as preview.png")
    if out.is_file() and any(Path(file.path).is_file() and out.samefile(file.path) for file in files):
        raise UsageError(f"--out {out} is one of the images: choose another file")


def _data(settings: dict[str, Any], files: Sequence[ImageFile]) -> ImageData:
    """Return the images of files as training data, in this order and in the size used for training."""
    for file in files:
        if file.error or not os.path.exists(file.path):  # noqa: PTH110 (Path raises errors for impossible names)
            raise UsageError(f"{file.path}: {file.error or 'there is no such file'}")
    paths = [file.path for file in files]
    configured = settings["image_size"]
    sizes = {image_size(path) for path in paths} if configured is None else {parse_image_size(configured)}
    size = sizes.pop()
    if sizes or (configured is None and max(size) > MAX_OWN_SIZE):  # the data set `folder` does the same
        size = (COMMON_SIZE, COMMON_SIZE)
    data = ImageData(**{**settings, "shuffle": False, "placement": "device"})
    levels = parse_levels(settings["levels"]) or common_levels(paths)
    preparation = Preparation(size, settings["channels"] or 3, settings["resize"], levels)
    pixels = np.stack([decode(path, *preparation) for path in paths])
    data.parts.train_images = ImageSet(torch.from_numpy(pixels), torch.zeros(len(files), dtype=torch.int64), ("photo",))
    data.parts.split = torch.arange(len(files)), torch.arange(0)
    return data
