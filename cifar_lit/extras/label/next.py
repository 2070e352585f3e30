"""`cifar-lit next RUN POOL…`: select the unlabelled images that a net is unsure of, and that differ from each other.

A k-means of the embeddings of all images has one cluster for each image to select. The weight of an image is its
uncertainty: 1 minus the difference between its two largest probabilities. Of each cluster, the image nearest to the
centre is selected (F. Zhdanov, Diverse mini-batch Active Learning, 2019, with all images as candidates).
`results/cpu/next-labels.json` compares this with random choice.
"""

from __future__ import annotations

import csv
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence, Set
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import torch
from jsonargparse.typing import PositiveInt
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.cli.classify import MAX_PIXELS
from cifar_lit.cli.errors import command_parser, parsed
from cifar_lit.data.decode import pixel_limit
from cifar_lit.data.formats import IMAGES
from cifar_lit.data.progress import progress
from cifar_lit.errors import Failure, UsageError
from cifar_lit.extras.label.journal import JOURNAL, Journal
from cifar_lit.extras.label.review import with_plain_names
from cifar_lit.files import writing
from cifar_lit.hardware import resolve_device
from cifar_lit.inference.classify import ImageFile, classify_files, find_images
from cifar_lit.inference.embeddings import logits_and_embeddings
from cifar_lit.inference.load import Classifier, load
from cifar_lit.memory import keep_freed_memory
from cifar_lit.runs.model_file import ModelCard
from cifar_lit.runs.predictions import Row
from cifar_lit.runs.run_data import RunData
from cifar_lit.runs.run_folder import display_path, weights_file
from cifar_lit.text import counted, csv_cell, note, say

ROUNDS = 10  # k-means iterations
DESCRIPTION = (
    "Select the images of a pool whose labels would teach the net of a run most: images that it is unsure of, and that "
    "differ from each other. Write them as a table with an empty column for the label, to label with `review --pool`."
)


def select_next(argv: list[str]) -> None:
    """Write the table."""
    parser = command_parser("next", DESCRIPTION)
    add = parser.add_argument
    add("run", type=str, metavar="RUN", help="run folder, or its model.safetensors")
    paths = "files, folders, patterns such as '*.jpg' or '**/*.png', or - to read paths from standard input"
    add("pool", type=str, nargs="+", metavar="POOL", help=paths)
    add("-k", "--count", type=PositiveInt, default=50, help="number of images to select")
    add("--out", type=str, default="next.csv", metavar="FILE.csv", help="table to write")
    add("--data-dir", type=str | None, default=None, help="folder of the run's images, if they were moved")
    add("--accelerator", type=str, default="auto", help="device: auto, cpu, gpu, cuda:1 or mps")
    settings = parsed(parser, argv)
    out = Path(settings.out).expanduser()
    if out.name.lower().endswith(IMAGES):
        raise UsageError(f"--out {out} is called like an image: give a table such as next.csv")
    classifier = load(settings.run, device=resolve_device(settings.accelerator))
    keep_freed_memory()
    if len(classifier.classes) == 1:
        raise UsageError(f"the net of {settings.run} has a single class and is never unsure: name another run")
    files = with_plain_names(list(find_images(settings.pool, sys.stdin.buffer)))
    labelled, reviewed = _labelled_images(weights_file(settings.run), classifier.card, settings.data_dir)
    pool = [file for file in files if os.path.normpath(Path(file.path).absolute()) not in reviewed]
    with pixel_limit(MAX_PIXELS), progress("classifying", len(pool), min_seconds=5.0) as advance:
        rows, left_out = next_images(classifier, pool, settings.count, advance, labelled)
    left_out["labelled already"] += len(files) - len(pool)
    number = counted(len(files), "file")
    if not rows and left_out["labelled already"]:
        raise UsageError(f"{number}, and no readable image without a label: name folders with other images")
    if not rows:
        raise UsageError(f"none of {number} is a readable image: name folders of images")
    with writing(out, "Choose another place with --out.", parents=True) as part:
        _write_table(part, rows)
    counts = [f"{left_out[reason]:,} {reason}" for reason in ("unreadable", "labelled already", "repeated")]
    say(
        f"{len(rows):,} of {number} ({', '.join(counts)}) to label: {display_path(out)}",
        f"label them: cifar-lit review {shlex.quote(settings.run)} --pool {shlex.quote(str(out))}",
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
            if (folder / JOURNAL).exists():
                with closing(Journal(folder / JOURNAL, card.classes)) as journal:
                    for decision in journal.decisions.values():
                        if decision.action != "skip":
                            reviewed.add(decision.image)
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


def next_images(
    classifier: Classifier, files: Sequence[ImageFile], count: int, advance: Callable[[int], None], labelled: Set[bytes]
) -> tuple[list[Row], Counter[str]]:
    """Select at most `count` of the files. Files with equal pixels, at the size of the net, count as one.

    Args:
        files: the pool. The memory needed grows by the embedding of each file, in float16.
        advance: callback with the number of files processed since the last call.
        labelled: digests of images to leave out.

    Returns the images, the most uncertain first, and the numbers of files that were left out by their reason.
    """
    pool: dict[bytes, Row] = {}
    embeddings: list[Tensor] = []
    left_out: Counter[str] = Counter()
    for rows, images in classify_files(classifier, files, top=2):
        left_out["unreadable"] += len(rows) - len(images)
        pixels = images.permute(0, 2, 3, 1)
        readable = [row for row in rows if row.error is None]
        new = []
        for place, digest in enumerate(digests(pixels)):
            if digest in labelled:
                left_out["labelled already"] += 1
            elif digest in pool:
                left_out["repeated"] += 1
            else:
                pool[digest] = readable[place]
                new.append(place)
        if new:
            _, parts = logits_and_embeddings(classifier, pixels.__getitem__, torch.tensor(new), lambda number: None)
            embeddings.append(parts.half())
        advance(len(rows))
    if not pool:
        return [], left_out
    candidates = list(pool.values())
    selected = select(torch.tensor([margin_of(row) for row in candidates]), torch.cat(embeddings), count)
    return [candidates[place] for place in selected.tolist()], left_out


def digests(images: Tensor) -> list[bytes]:
    """Return a hash of the pixels of each image, uint8 (N, H, W, C)."""
    return [sha256(image.tobytes()).digest() for image in images.numpy()]


def margin_of(row: Row) -> float:
    """Return the difference between the two largest probabilities of an image."""
    return row.top[0][1] - row.top[1][1]


def select(margins: Tensor, embeddings: Tensor, count: int) -> Tensor:
    """Return the rows of the images to label next, int64 (at most `count`,), the smallest margin first.

    Args:
        margins: difference between the two largest probabilities of each image, float (N,).
        embeddings: float (N, features).
    """
    if len(margins) <= count:
        return margins.argsort(stable=True)
    points = embeddings.float()
    points = F.normalize(points - points.mean(0), dim=1)
    weights = (1 - margins.float()).clamp_min(1e-6)
    generator = torch.Generator().manual_seed(0)
    first = [int(weights.argmax())]  # the other first centres are drawn as in k-means++
    distances = torch.full_like(weights, torch.inf)
    while len(first) < count:
        distances = distances.minimum((points - points[first[-1]]).square().sum(1))
        distances[first] = 1e-12
        first.append(int(torch.multinomial(weights * distances, 1, generator=generator)))
    centres = points[first]
    for _ in range(ROUNDS):
        nearest = torch.cdist(points, centres).argmin(1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points * weights[:, None])
        totals = torch.zeros(count).index_add_(0, nearest, weights)[:, None]
        centres = torch.where(totals > 0, sums / totals, centres)
    distances = torch.cdist(points, centres)
    chosen = []
    for column in distances.T:  # each centre takes the nearest image that is left
        chosen.append(int(column.argmin()))
        distances[chosen[-1]] = torch.inf
    rows = torch.tensor(chosen)
    return rows[margins[rows].argsort(stable=True)]
