"""`cifar-lit review RUN`: check labels in the browser, the most suspicious first, and write a table to train with."""

from __future__ import annotations

import json
import os
import shlex
import sys
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jsonargparse import Namespace
from torch import Tensor

from cifar_lit.cli.errors import command_parser, parsed
from cifar_lit.cli.serve import listen
from cifar_lit.cli.trust import allow_run
from cifar_lit.data.progress import progress
from cifar_lit.data.sources import load_images
from cifar_lit.data.table import SUFFIXES, read_table
from cifar_lit.errors import Failure, UsageError
from cifar_lit.files import read_text
from cifar_lit.hardware import keep_freed_memory, resolve_device
from cifar_lit.inference.classify import ImageFile, classify_files, find_images
from cifar_lit.inference.embeddings import logits_and_embeddings
from cifar_lit.inference.load import Classifier, load
from cifar_lit.inference.review.journal import JOURNAL, TABLE, Journal, Labels
from cifar_lit.inference.review.queue import Queue, most_suspicious, read_array
from cifar_lit.runs.run_data import run_image_data
from cifar_lit.runs.run_folder import RunFolder, display_path, owner_of, weights_file
from cifar_lit.text import counted, note, say

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData

DESCRIPTION = """Review the labels of a run's training and validation images in the browser, the most suspicious first.

RUN is a run folder, or the folder of a cross-validation (train --folds). Every decision is stored at once in
review.jsonl in this folder. labels-reviewed.csv there has the resulting labels, for a new training. It is written at
the start, at the end, and when the page asks for it. The images and tables of the run are not changed."""


def review(argv: list[str]) -> None:
    """Serve the review until Ctrl-C or SIGTERM."""
    settings = _settings(argv)
    run = Path(settings.run).expanduser()
    run = run if run.is_dir() else run.parent
    has_folds = (run / "folds.json").is_file()
    source = _first_fold(run, settings.trust) if has_folds else run  # the folder with a net and a config.yaml
    classifier = load(weights_file(source if has_folds else settings.run), resolve_device(settings.device))
    keep_freed_memory()
    data = run_image_data(source, classifier.card, settings.dataset, settings.data_dir)
    labels = current_labels(data)
    labels.check()
    with _locked(run), closing(Journal(run / JOURNAL, data.classes)) as journal:

        def write() -> int:
            return labels.write(run / TABLE, journal.decisions)

        if not settings.export:
            if journal.decisions:
                write()  # a killed review did not
            with listen("127.0.0.1", settings.port) as sock:
                queue = _queue(settings, run, classifier, data, labels.keys)
                from cifar_lit.inference.review.http import LIMITS, ReviewApp

                command = training_command(run, source, labels, data)
                app = ReviewApp(queue, journal, write, {"run": display_path(run), "command": command})
                address = f"http://127.0.0.1:{sock.getsockname()[1]}/{app.token}/"

                def on_ready() -> None:
                    say(f"{counted(len(queue), 'image')} to review at {address} · stop with Ctrl-C")
                    if settings.open:
                        webbrowser.open(address)

                app.run(sock, LIMITS, on_ready)
        rows = write()
        say(f"{counted(len(journal.decisions), 'reviewed image')} · {rows:,} rows in {display_path(run / TABLE)}")
    say(f"train with them: {training_command(run, source, labels, data)}")


def _settings(argv: list[str]) -> Namespace:
    parser = command_parser("review", DESCRIPTION)
    add = parser.add_argument
    add("run", type=str, help="run folder, or the folder of a cross-validation")
    add("--table", type=str | None, default=None, help="label the images of a table with a column path, in its order")
    add("--pool", type=str | None, default=None, help="label the images in a folder")
    add("--limit", type=int, default=1000, help="most images to show; 0 for all")
    add("--export", action="store_true", help="only write labels-reviewed.csv from the decisions so far")
    add("--port", type=int, default=8001, help="port of this machine to listen on; 0 for a free one")
    add("--open", action="store_true", help="open the page in the browser")
    add("--dataset", type=str | None, default=None, help="data set, if there is no config.yaml")
    add("--data-dir", type=str | None, default=None, help="folder of the images, if they were moved")
    add("--device", type=str, default="auto", help="device: auto, cpu, gpu, cuda:1 or mps")
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
        run = folder.parent / Path(json.loads(read_text(folder / "folds.json"))["folds"][0]).name
    except (OSError, ValueError, LookupError, TypeError):
        raise Failure(f"{folder / 'folds.json'} is damaged: repeat the cross-validation") from None
    if not (run / "config.yaml").is_file():
        raise Failure(f"{display_path(run)}, a run of this cross-validation, is missing: move it beside {folder}")
    allow_run(run / "config.yaml", trusted)
    return run


@contextmanager
def _locked(run: Path) -> Iterator[None]:
    """Lock a run folder. Raise Failure if another process reviews or writes it."""
    try:
        folder = RunFolder(run.parent, run.name, run)
    except Failure:
        if owner := owner_of(run):
            remedy = "wait until it ends, or review another run"
            raise Failure(f"{owner} is reviewing or writing {display_path(run)}: {remedy}") from None
        raise
    try:
        yield
    finally:
        folder.release()


def current_labels(data: ImageData) -> Labels:
    """Return the labels of a run's images, training and validation images first, with the split of the run.

    A cross-validation has no split, unless the data set has its own test images.
    """
    images, folds, settings = data.train_images, data.parts.folds, data.settings
    own_val = torch.tensor(images.val_rows or (), dtype=torch.int64)
    is_val = torch.isin(torch.arange(len(images)), own_val if folds else data.split[1])
    splits = ["val" if val else "train" for val in is_val.tolist()]
    names = [images.classes[label] for label in images.labels.tolist()]
    if data.dataset != "folder":
        is_reviewed = (settings.labels or "").lower().endswith(SUFFIXES)  # the names are then those of the first table
        keys = [*(images.names or ())] if is_reviewed else [str(row) for row in range(len(images))]
        return Labels("image", keys, names, [] if folds else splits, [])
    test, train_names = load_images("folder", settings, train=False), set(images.names or ())
    tested = [(name, label) for name, label in zip(test.names or (), test.labels.tolist(), strict=True)
              if name not in train_names]  # fmt: skip
    folder = settings.path.absolute() if settings.path.is_dir() else settings.path.absolute().parent
    keys = [os.path.normpath(folder / name) for name in (*(images.names or ()), *(name for name, _ in tested))]
    names += [images.classes[label] for _, label in tested]
    if folds and not tested:
        return Labels("path", keys, names, [], [] if images.groups is None else list(map(str, images.groups.tolist())))
    return Labels("path", keys, names, [*splits, *["test" for _ in tested]], [])


def _queue(settings: Namespace, run: Path, classifier: Classifier, data: ImageData, keys: Sequence[str]) -> Queue:
    """Return the images to review, after a pass of the net over them and over the training images."""
    images = data.train_images
    pool = _pool(settings, classifier) if settings.table or settings.pool else None

    def embedded(take: Callable[[Tensor], Tensor], count: int, what: str) -> tuple[Tensor, Tensor]:
        with progress(f"computing embeddings of the {what}", count) as advance:
            logits, embeddings = logits_and_embeddings(classifier, take, torch.arange(count), advance)
        return classifier.net.probabilities(logits.to(classifier.net.mean.device)).cpu(), embeddings

    probabilities, embeddings = embedded(images.take, len(images), "training images")
    train = (images, keys[: len(images)], embeddings)
    if pool:
        files, pixels = pool
        probabilities, embeddings = embedded(lambda rows: pixels[rows], len(files), "images to label")
        return Queue(files, [None] * len(files), probabilities, embeddings, [False] * len(files), *train)
    if data.parts.folds and (run / "folds.json").is_file():  # by nets that were not trained on the image
        probabilities = read_array(run / "probabilities.npy", tuple(probabilities.shape)).float()
    order = most_suspicious(run, images.labels, probabilities)[: settings.limit or None]
    is_val = torch.isin(order, data.split[1]) & (not data.parts.folds)
    names = [images.classes[label] for label in images.labels[order].tolist()]
    files = [keys[row] for row in order.tolist()]
    return Queue(files, names, probabilities[order], embeddings[order], is_val.tolist(), *train)


def _pool(settings: Namespace, classifier: Classifier) -> tuple[list[str], Tensor]:
    """Return the readable files of a table or folder of images to label, and their pixels, uint8 (M, H, W, C)."""
    place = Path(settings.table or settings.pool).expanduser()
    if settings.table:
        files = [str(place.parent / row.path) for row in read_table(place, labelled=False)]
    elif place.is_dir():
        files = [file.path for file in find_images([str(place)], sys.stdin.buffer) if file.error is None]
    else:
        raise UsageError(f"--pool {place} is not a folder: name a folder of images, or a table with --table")
    # Two paths of one file are one image.
    images = [ImageFile(os.path.normpath(Path(file).absolute())) for file in files][: settings.limit or None]
    readable, pixels, bad = list[str](), list[Tensor](), dict[str, str]()
    for rows, part in classify_files(classifier, list(dict.fromkeys(images))):
        pixels.append(part)
        readable += [row.path for row in rows if row.path and not row.error]
        bad |= {row.path: row.error for row in rows if row.path and row.error}
    if bad:
        reasons = ", ".join(f"{path} ({reason})" for path, reason in [*bad.items()][:3])
        note(f"{len(bad):,} of {len(images):,} images cannot be read: {reasons}")
    if not readable:
        raise UsageError(f"there are no readable images in {place}: use JPEG, PNG, WebP, BMP or GIF")
    return readable, torch.cat(pixels).permute(0, 2, 3, 1)


def training_command(run: Path, source: Path, labels: Labels, data: ImageData) -> str:
    """Return the command that trains with the reviewed labels, and the settings of the run."""
    config = source / "config.yaml"
    settings = f"--config {shlex.quote(display_path(config))}" if config.is_file() else "--recipe NAME"
    kind = "--dataset folder --data-dir" if labels.column == "path" else f"--dataset {data.dataset} --data.labels"
    others = (" --data.folds 0" if data.parts.folds else "") + (" --data.group null" if data.settings.group else "")
    return f"cifar-lit train {settings} {kind} {shlex.quote(display_path(run / TABLE))}{others}"
