"""`cifar-lit next RUN POOL…`: select the unlabelled images to label next."""

from __future__ import annotations

import csv
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from cifar_lit.cli.classify import MAX_PIXELS
from cifar_lit.cli.errors import command_parser, parsed
from cifar_lit.data.decode import SUFFIXES, pixel_limit
from cifar_lit.data.progress import progress
from cifar_lit.errors import Failure, UsageError
from cifar_lit.extras.label.journal import JOURNAL, decided_images
from cifar_lit.extras.label.review import with_plain_names
from cifar_lit.extras.label.selection import digests, margin_of, next_images
from cifar_lit.files import writing
from cifar_lit.hardware import keep_freed_memory, resolve_device
from cifar_lit.inference.classify import MAX_PICTURES, contact_sheet, find_images, is_picture_name, save_picture
from cifar_lit.inference.load import load
from cifar_lit.runs.model_file import ModelCard
from cifar_lit.runs.predictions import Row
from cifar_lit.runs.run_data import RunData
from cifar_lit.runs.run_folder import display_path, weights_file
from cifar_lit.text import counted, csv_cell, note, say

DESCRIPTION = (
    "Select the images of a pool whose labels would teach the net of a run most: images that it is unsure of, and that "
    "differ from each other. Write them as a table with an empty column for the label, and as a contact sheet."
)


def select_next(argv: list[str]) -> None:
    """Write the table and the contact sheet."""
    parser = command_parser("next", DESCRIPTION)
    add = parser.add_argument
    add("run", type=str, metavar="RUN", help="run folder, or its model.safetensors")
    paths = "files, folders, patterns such as '*.jpg' or '**/*.png', or - to read paths from standard input"
    add("pool", type=str, nargs="+", metavar="POOL", help=paths)
    add("-k", "--count", type=int, default=50, help="number of images to select")
    add("--out", type=str, default="next.csv", metavar="FILE.csv", help="table to write")
    add("--sheet", type=str, default="next.png", metavar="FILE.png", help="contact sheet to draw")
    add("--max-pixels", type=int, default=MAX_PIXELS, help="skip larger images (decompression bombs)")
    add("--data-dir", type=str | None, default=None, help="folder of the run's images, if they were moved")
    add("--accelerator", type=str, default="auto", help="device: auto, cpu, gpu, cuda:1 or mps")
    settings = parsed(parser, argv)
    out, sheet = Path(settings.out).expanduser(), Path(settings.sheet).expanduser()
    if settings.count < 1 or settings.max_pixels < 1:
        raise UsageError("--count and --max-pixels must be at least 1")
    if out.name.lower().endswith(SUFFIXES) or not is_picture_name(sheet):
        raise UsageError(f"--out {out} --sheet {sheet}: give a table such as next.csv, and a picture such as next.png")
    classifier = load(settings.run, device=resolve_device(settings.accelerator))
    keep_freed_memory()
    if len(classifier.classes) == 1:
        raise UsageError(f"the net of {settings.run} has a single class and is never unsure: name another run")
    files = with_plain_names(list(find_images(settings.pool, sys.stdin.buffer)))
    for target in (out, sheet):
        if target.is_file() and any(Path(file.path).exists() and target.samefile(file.path) for file in files):
            raise UsageError(f"{target} is an image of the pool: name other files with --out and --sheet")
    labelled, reviewed = _labelled_images(weights_file(settings.run), classifier.card, settings.data_dir)
    with pixel_limit(settings.max_pixels):
        with progress("classifying", len(files), min_seconds=5.0) as advance:
            selection = next_images(classifier, files, settings.count, advance, labelled, reviewed)
        rows, *left_out = selection
        number = counted(len(files), "file")
        if not rows and selection.labelled:
            raise UsageError(f"{number}, and no readable image without a label: name folders with other images")
        if not rows:
            raise UsageError(f"none of {number} is a readable image: name folders of images")
        with writing(out, "Choose another place with --out.", parents=True) as part:
            _write_table(part, rows)
        save_picture(contact_sheet(rows[:MAX_PICTURES], classifier.preparation.levels), sheet)
    counts = "{:,} unreadable, {:,} labelled already, {:,} repeated".format(*left_out)
    say(
        f"{len(rows):,} of {number} ({counts}) to label: {display_path(out)}, {display_path(sheet)}",
        f"label them: cifar-lit review {shlex.quote(settings.run)} --table {shlex.quote(str(out))}",
    )


def _labelled_images(model: Path, card: ModelCard, data_dir: str | None) -> tuple[set[bytes], set[str]]:
    """Return digests of a run's images, and the paths decided in its reviews.

    These are the review of the run, and the one whose table the run was trained on. A note says what cannot be read.
    """
    labelled: set[bytes] = set()
    reviewed: set[str] = set()
    try:
        data = RunData(model, card, data_dir)
        table = Path(data.settings.labels or data.settings.path).expanduser()
        for images in data.parts():
            labelled.update(digests(images))
        for folder in dict.fromkeys((table.parent, model.parent)):
            reviewed |= decided_images(folder / JOURNAL, card.classes)
    except (UsageError, Failure) as error:
        note(f"images with a label may be selected again: {error}")
    return labelled, reviewed


def _write_table(file: Path, rows: Sequence[Row]) -> None:
    """Write one row for each image, the most uncertain first. Paths are absolute, so that the table can be moved."""
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(("path", "label", "predicted", "probability", "margin"))
        for row in rows:
            label, probability = row.top[0]
            path = str(Path(row.path or "").absolute())
            writer.writerow([csv_cell(path), "", csv_cell(label), f"{probability:.6f}", f"{margin_of(row):.6f}"])
