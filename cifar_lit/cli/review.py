"""`cifar-lit review RUN`: check labels in the browser, the most suspicious first, and write a table to train with."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jsonargparse import Namespace
from torch import Tensor

from cifar_lit.cli.errors import command_parser, parsed
from cifar_lit.cli.serve import listen
from cifar_lit.cli.trust import allow_run
from cifar_lit.data.decode import KINDS
from cifar_lit.data.formats import TABLES
from cifar_lit.data.listed_files import find_files
from cifar_lit.data.progress import progress
from cifar_lit.data.sources import load_images
from cifar_lit.data.table import read_table
from cifar_lit.errors import Failure, UsageError
from cifar_lit.files import as_on_disk, read_text
from cifar_lit.hardware import keep_freed_memory, resolve_device
from cifar_lit.inference.classify import ImageFile, classify_files, find_images
from cifar_lit.inference.embeddings import logits_and_embeddings
from cifar_lit.inference.load import Classifier, load
from cifar_lit.inference.review.journal import JOURNAL, TABLE, Journal, Labels, is_cell
from cifar_lit.inference.review.queue import Queue, most_suspicious
from cifar_lit.runs.data_record import data_record
from cifar_lit.runs.label_errors import read_array
from cifar_lit.runs.run_data import run_image_data
from cifar_lit.runs.run_folder import RunFolder, display_path, read_metrics, weights_file
from cifar_lit.text import counted, note, say

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData
    from cifar_lit.data.image_set import ImageSet

DESCRIPTION = """Review the labels of a run's training and validation images in the browser, the most suspicious first.

RUN is a run folder, or the folder of a cross-validation (train --folds). Every decision is stored at once in
review.jsonl in this folder. labels-reviewed.csv there has the resulting labels, for a new training. It is written at
the start, at the end, and when the page asks for it, and adds the images that the run's folder got since. The images
and tables of the run are not changed."""


def review(argv: list[str]) -> None:
    """Serve the review until Ctrl-C or SIGTERM."""
    settings = _settings(argv)
    run = Path(settings.run).expanduser()
    run = run if run.is_dir() else run.parent
    has_folds = (run / "folds.json").is_file()
    source = _first_fold(run, settings.trust) if has_folds else run  # the folder with a net and a config.yaml
    classifier = load(weights_file(source if has_folds else settings.run), resolve_device(settings.accelerator))
    keep_freed_memory()
    data = run_image_data(source, classifier.card, settings.dataset, settings.data_dir)
    labels = current_labels(data)
    labels.check()
    command = training_command(source, run / TABLE, labels, data)
    if not os.access(run, os.W_OK):
        raise Failure(f"{display_path(run)} cannot be written, and decisions are stored there: review a copy of it")
    with ExitStack() as stack:
        stack.callback(RunFolder(run.parent, run.name, run).release)
        journal = stack.enter_context(closing(Journal(run / JOURNAL, data.classes)))
        table = run / TABLE
        earlier = {row.path: row.split for row in read_table(table)} if table.is_file() else {}
        if merged := labels.with_split_of(earlier, journal.decisions):
            labels, added = merged
            if added:
                note(f"{counted(added, 'image')} added to {display_path(table)}, which keeps its split")
        else:
            _note_changes(source, data)

        def write() -> int:
            return labels.write(table, journal.decisions)

        if not settings.export:
            from cifar_lit.inference.review.http import LIMITS, ReviewApp

            if journal.decisions:
                write()  # a killed review did not
            sock = stack.enter_context(listen("127.0.0.1", settings.port))
            queue = _queue(settings, run, classifier, data, labels)
            about = {"run": display_path(run), "command": command, "open": labels.column == "path"}
            app = ReviewApp(queue, journal, write, about)
            address = f"http://127.0.0.1:{sock.getsockname()[1]}/{app.token}/"
            count = counted(len(queue.keys), "image")
            app.run(sock, LIMITS, lambda: say(f"{count} to review at {address} · stop with Ctrl-C"))
        strange = {made.image for made in journal.decisions.values() if not made.new}.difference(labels.keys)
        if strange:
            note(f"{counted(len(strange), 'decision')} without effect: this data set has no {min(strange)}")
        text = f"{counted(len(journal.decisions), 'decision')} · {write():,} rows in {display_path(table)}"
    say(text, f"train with them: {command}")


def _settings(argv: list[str]) -> Namespace:
    parser = command_parser("review", DESCRIPTION)
    add = parser.add_argument
    add("run", type=str, help="run folder, or the folder of a cross-validation")
    add("--table", type=str | None, default=None, help="label the images of a table with a column path, in its order")
    add("--pool", type=str | None, default=None, help="label the images in a folder")
    add("--limit", type=int, default=1000, help="most images to show; 0 for all")
    add("--export", action="store_true", help="only write labels-reviewed.csv from the decisions so far")
    add("--port", type=int, default=8001, help="port of this machine to listen on; 0 for a free one")
    add("--dataset", type=str | None, default=None, help="data set, if there is no config.yaml")
    add("--data-dir", type=str | None, default=None, help="folder of the images, if they were moved")
    add("--accelerator", type=str, default="auto", help="device: auto, cpu, gpu, cuda:1 or mps")
    settings = parsed(parser, argv)
    if settings.limit < 0:
        raise UsageError(f"--limit must be 0 or more, not {settings.limit}")
    if settings.table and settings.pool:
        raise UsageError("--table and --pool both name the images to label: use one of them")
    missing = [package for package in ("starlette", "uvicorn", "httptools") if find_spec(package) is None]
    if missing and not settings.export:
        raise Failure(f'review needs missing packages ({", ".join(missing)}): pip install "cifar-lit[serve]"')
    return settings


def _first_fold(folder: Path, trusted: bool) -> Path:
    """Return the run of the first fold of a cross-validation, which lies beside its folder."""
    try:
        run = folder.absolute().parent / Path(json.loads(read_text(folder / "folds.json"))["folds"][0]).name
    except (OSError, ValueError, LookupError, TypeError):
        raise Failure(f"{folder / 'folds.json'} is damaged: repeat the cross-validation") from None
    if not (run / "config.yaml").is_file():
        raise Failure(f"{display_path(run)}, a run of this cross-validation, is missing: move it beside {folder}")
    allow_run(run / "config.yaml", trusted)
    return run


def current_labels(data: ImageData) -> Labels:
    """Return the labels of a run's images, training and validation images first, with the split of the run.

    A cross-validation has no split, unless the data set has its own test images.
    """
    images, folds, settings = data.train_images, data.parts.folds, data.settings
    names = [images.classes[label] for label in images.labels.tolist()]
    own_val = torch.tensor(images.val_rows or (), dtype=torch.int64)
    is_val = torch.isin(torch.arange(len(images)), own_val if folds else data.split[1])
    splits = ["val" if val else "train" for val in is_val.tolist()]
    if data.dataset != "folder":
        if settings.labels == "coarse":
            raise UsageError("the coarse labels of cifar100 cannot be reviewed: review a run on the fine labels")
        is_reviewed = (settings.labels or "").lower().endswith(TABLES)  # the names are those of the first table
        keys = [*(images.names or ())] if is_reviewed else [str(row) for row in range(len(images))]
        dates = _earlier_dates(Path(settings.labels or "").expanduser()) if is_reviewed else {}
        return Labels("image", keys, names, *(("", []) if folds else ("split", splits)), dates)
    train_names, test = images.names or (), load_images("folder", settings, train=False)
    trained = set(train_names)  # without test images, the validation images are the test set
    pairs = zip(test.names or (), test.labels.tolist(), strict=True)
    tested = {name: label for name, label in pairs if name not in trained}
    folder = settings.path.absolute() if settings.path.is_dir() else settings.path.absolute().parent
    dates = {} if settings.path.is_dir() else _earlier_dates(settings.path)
    keys = [os.path.normpath(folder / name) for name in (*train_names, *tested)]
    if folds and not tested:
        groups = [] if images.groups is None else [str(group) for group in images.groups.tolist()]
        return Labels("path", keys, names, "group" if groups else "", groups, dates)
    names += [images.classes[label] for label in tested.values()]
    test_groups = zip(_groups(test), test.names or (), strict=True)
    all_groups = [*_groups(images), *(group for group, name in test_groups if name in tested)]
    return Labels("path", keys, names, "split", [*splits, *["test"] * len(tested)], dates, all_groups)


def _groups(images: ImageSet) -> list[tuple[int, int] | None]:
    """Return the group of each image, or of its near-duplicates. Numbers of different sets are unrelated."""
    if images.groups is None:
        return [None] * len(images)
    return [(id(images), group) for group in images.groups.tolist()]


def _earlier_dates(table: Path) -> dict[str, str]:
    """Return the dates in a table of an earlier review, by the key of the image."""
    folder = table.absolute().parent
    dates = {}
    for row in read_table(table):
        path = os.path.normpath(as_on_disk(row.path, str(folder)))
        if row.reviewed:
            dates[str(int(row.path)) if row.path.isdecimal() else path] = row.reviewed
    return dates


def _note_changes(run: Path, data: ImageData) -> None:
    """Say if the data are not those of the training. A split drawn by seed changes with the files of a folder."""
    record = read_metrics(run).get("data")
    if not isinstance(record, dict):
        return
    now = data_record(data)
    if changed := [name for name in ("images", "labels", "split") if record.get(name) != now[name]]:
        what = "images" if "images" in changed else " and ".join(changed)  # other images have another split
        note(
            f"the {what} of the data changed since {display_path(run)} was trained ({record.get('train')} training "
            f"images then, {now['train']} now). {TABLE} gets the present split, so its test images may be training "
            "images of the run"
        )


def _queue(settings: Namespace, run: Path, classifier: Classifier, data: ImageData, labels: Labels) -> Queue:
    """Return the images to review, after a pass of the net over them and over the training images.

    Images with a decision of an earlier review come last.
    """
    images, keys = data.train_images, labels.keys
    pool = _pool(settings, classifier) if settings.table or settings.pool else None

    def embedded(take: Callable[[Tensor], Tensor], count: int, what: str) -> tuple[Tensor, Tensor]:
        with progress(f"computing embeddings of the {what}", count) as advance:
            logits, embeddings = logits_and_embeddings(classifier, take, torch.arange(count), advance)
        return classifier.net.probabilities(logits.to(classifier.net.mean.device)).cpu(), embeddings

    probabilities, embeddings = embedded(images.take, len(images), "training images")
    train = (images, keys[: len(images)], embeddings)
    if pool:
        files, pixels = pool
        probabilities, embeddings = embedded(pixels.__getitem__, len(files), "images to label")
        return Queue(files, [None] * len(files), probabilities, embeddings, *train)
    if data.parts.folds and (run / "folds.json").is_file():  # predicted by nets that were not trained on the image
        file, shape = run / "probabilities.npy", tuple(probabilities.shape)
        if (held_out := read_array(file, shape)) is None:
            fault = f"{file} does not hold {' × '.join(map(str, shape))} numbers, as the data of this run need"
            raise Failure(f"{fault}: if the data were moved or changed, name those of the run with --data-dir")
        probabilities = held_out
    order = most_suspicious(run, images.labels, probabilities)
    is_decided = torch.tensor([keys[row] in labels.dates for row in order.tolist()])
    order = torch.cat([order[~is_decided], order[is_decided]])[: settings.limit or None]
    names = [images.classes[label] for label in images.labels[order].tolist()]
    return Queue([keys[row] for row in order.tolist()], names, probabilities[order], embeddings[order], *train)


def _pool(settings: Namespace, classifier: Classifier) -> tuple[list[str], Tensor]:
    """Return the readable files of a table or folder of images to label, and their pixels, uint8 (M, H, W, C)."""
    place = Path(settings.table or settings.pool).expanduser()
    if settings.table:
        listed = [row.path for row in read_table(place, labelled=False)]
        found = find_files(place, listed)
        files = [str(place.parent / found.get(path, path)) for path in listed]
    elif place.is_dir():
        files = [file.path for file in find_images([str(place)], sys.stdin.buffer) if file.error is None]
    else:
        raise UsageError(f"--pool {place} is not a folder: name a folder of images, or a table with --table")
    paths = dict.fromkeys(os.path.normpath(Path(file).absolute()) for file in files)
    images = with_plain_names([ImageFile(path) for path in paths])
    results = list(classify_files(classifier, images[: settings.limit or None]))
    rows = [row for chunk, _ in results for row in chunk]
    if bad := [f"{row.path} ({row.error})" for row in rows if row.error]:
        note(f"{len(bad):,} of {len(rows):,} images cannot be read: {', '.join(bad[:3])}")
    if len(bad) == len(rows):
        raise UsageError(f"there are no readable images in {place}: use {KINDS}")
    pixels = torch.cat([pixels for _, pixels in results]).permute(0, 2, 3, 1)
    return [row.path for row in rows if row.path and not row.error], pixels


def with_plain_names(files: list[ImageFile]) -> list[ImageFile]:
    """Return the files whose absolute paths a table can hold. A note counts the others."""
    odd = {file.path for file in files if not is_cell(str(Path(file.path).absolute()))}
    if odd:
        note(f"left out {counted(len(odd), 'file')} with names that a table cannot hold, such as {min(odd)[:200]}")
    return [file for file in files if file.path not in odd]


def training_command(source: Path, table: Path, labels: Labels, data: ImageData) -> str:
    """Return the command that trains with the reviewed labels and the settings of a run."""
    config = source / "config.yaml"
    settings = f"--config {shlex.quote(display_path(config))}" if config.is_file() else f"--dataset {data.dataset}"
    flag = "--data-dir" if labels.column == "path" else "--data.labels"
    others = " --data.split.folds 0" if data.parts.folds else ""
    others += " --data.split.group null" if data.settings.split.group else ""
    return f"cifar-lit train {settings} {flag} {shlex.quote(display_path(table))}{others}"
