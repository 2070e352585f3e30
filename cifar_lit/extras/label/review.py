"""`cifar-lit review RUN`: check labels in the browser, the most suspicious first, and write a table to train with."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jsonargparse import Namespace
from jsonargparse.typing import NonNegativeInt
from torch import Tensor

from cifar_lit.base.command_line import command_parser, parsed
from cifar_lit.base.errors import Failure, UsageError, check_packages
from cifar_lit.base.files import display_path, read_json
from cifar_lit.base.hardware import resolve_device
from cifar_lit.base.text import counted, listed, note, progress, say
from cifar_lit.data.photos.decode import DecodeError, decode
from cifar_lit.data.photos.layout import TABLES
from cifar_lit.data.photos.table import read_table
from cifar_lit.extras.label.journal import JOURNAL, Journal
from cifar_lit.extras.label.queue import Queue
from cifar_lit.extras.label.table import TABLE, Labels, current_labels, is_cell
from cifar_lit.inference.classify import find_images
from cifar_lit.inference.load import Classifier, load
from cifar_lit.inference.logits import logits_and_embeddings
from cifar_lit.inference.model_file import weights_file
from cifar_lit.run.folder import RunFolder
from cifar_lit.run.images import run_image_data
from cifar_lit.runs.label_errors import LIST, evidence, rank_labels, read_array, write_ranking

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData

DESCRIPTION = """Review the labels of a run's training and validation images in the browser, the most suspicious first.

RUN is a run folder, or the folder of a cross-validation (train --folds). Every decision is stored at once in its
review.jsonl. Its labels-reviewed.csv has the resulting labels, for a new training: it is written at the start, at the
end, and when the page asks for it, with the images that the run's folder got since. The run's own data stay."""


def review(argv: list[str]) -> None:
    """Serve the review until Ctrl-C or SIGTERM."""
    settings = _settings(argv)
    run = Path(settings.run).expanduser()
    model = settings.run
    if not run.is_dir():
        run = run.parent
    source = run  # the folder with a net and a config.yaml
    if (run / "folds.json").is_file():
        model = source = _first_fold(run)
    classifier = load(weights_file(model), resolve_device(settings.accelerator))
    data = run_image_data(source, classifier.card, settings.dataset, settings.data_dir)
    labels = current_labels(data)
    labels.check()
    table = run / TABLE
    command = training_command(source, table, labels, data)
    with ExitStack() as stack:
        stack.callback(RunFolder(run.parent, run.name, run).release)
        journal = Journal(run / JOURNAL, data.classes)
        if table.is_file():
            earlier = {row.path: row.split for row in read_table(table) if row.split}
            own, labels = labels, labels.with_split_of(earlier)
            added = {*labels.keys} - earlier.keys() - journal.decisions.keys()
            if added and labels is not own:
                note(f"{counted(len(added), 'image')} added to {display_path(table)}, which keeps its split")

        def write() -> int:
            return labels.write(table, journal.decisions)

        if not settings.export:
            from cifar_lit.extras.label.app import PAGE, Review
            from cifar_lit.extras.web import Server, application, listen

            write()  # a killed review did not
            sock = stack.enter_context(listen("127.0.0.1", settings.port))
            queue = _queue(settings, run, classifier, data, labels)
            about = {"run": display_path(run), "command": command, "open": labels.column == "path"}
            root = f"/{secrets.token_urlsafe(16)}"  # known only to the reader of the console
            app = application(Review(queue, journal, write, about).routes, PAGE, ["localhost"], root)
            address = f"http://127.0.0.1:{sock.getsockname()[1]}{root}/"
            say(f"{counted(len(queue.keys), 'image')} to review at {address} · stop with Ctrl-C")
            Server(app).run([sock])
        strange = {made.image for made in journal.decisions.values() if not made.new}.difference(labels.keys)
        if strange:
            note(f"{counted(len(strange), 'decision')} without effect: this data set has no {min(strange)}")
        text = f"{counted(len(journal.decisions), 'decision')} · {write():,} rows in {display_path(table)}"
    say(text, f"train with them: {command}")


def _settings(argv: list[str]) -> Namespace:
    parser = command_parser("review", DESCRIPTION)
    add = parser.add_argument
    add("run", type=str, help="run folder, or the folder of a cross-validation")
    add("--pool", type=str | None, default=None, help="label the images of a folder, or of a table with a column path")
    add("--limit", type=NonNegativeInt, default=1000, help="most images to show; 0 for all")
    add("--export", action="store_true", help="only write labels-reviewed.csv from the decisions so far")
    add("--port", type=int, default=8001, help="port of this machine to listen on; 0 for a free one")
    add("--dataset", type=str | None, default=None, help="data set, if there is no config.yaml")
    add("--data-dir", type=str | None, default=None, help="folder of the images, if they were moved")
    add("--accelerator", type=str, default="auto", help="device: auto, cpu, gpu, cuda:1 or mps")
    settings = parsed(parser, argv)
    if settings.limit == 0:
        settings.limit = None
    if not settings.export:
        check_packages("review", ("starlette", "uvicorn"), "serve")
    return settings


def _first_fold(folder: Path) -> Path:
    """Return the run of the first fold of a cross-validation, which lies beside its folder."""
    return folder.absolute().parent / Path(read_json(folder / "folds.json")["folds"][0]).name


def _queue(settings: Namespace, run: Path, classifier: Classifier, data: ImageData, labels: Labels) -> Queue:
    """Return the images to review, after a pass of the net over them and over the training images."""
    images, keys = data.train_images, labels.keys
    if settings.pool:
        files, pixels = _pool(settings, classifier)

    def embedded(take: Callable[[Tensor], Tensor], count: int, what: str) -> tuple[Tensor, Tensor]:
        with progress(f"computing embeddings of the {what}", count) as advance:
            logits, embeddings = logits_and_embeddings(classifier.net, take, torch.arange(count), advance)
        return classifier.net.probabilities(logits.to(classifier.net.mean.device)).cpu(), embeddings

    probabilities, embeddings = embedded(images.take, len(images), "training images")
    train = (images, keys[: len(images)], embeddings)
    if settings.pool:
        probabilities, embeddings = embedded(pixels.__getitem__, len(files), "images to label")
        return Queue(files, [None] * len(files), probabilities, embeddings, *train)
    if data.parts.folds and (run / "folds.json").is_file():  # predicted by nets that were not trained on the image
        held_out = read_array(run / "probabilities.npy", tuple(probabilities.shape))
        if held_out is None:
            fault = f"{run / 'probabilities.npy'} has not {len(images)} rows, as the data of this run"
            raise Failure(f"{fault}: if the data were moved or changed, name those of the run with --data-dir")
        probabilities = held_out
        ranking = rank_labels(images.labels, probabilities)
    else:
        probabilities, margins = evidence(run, probabilities)
        ranking = rank_labels(images.labels, probabilities, margins)
        write_ranking(run / LIST, images, ranking, data.parts.part_names())
    order = ranking.rows[: settings.limit]
    rows = order.tolist()
    names = [labels.labels[row] for row in rows]
    return Queue([keys[row] for row in rows], names, probabilities[order], embeddings[order], *train)


def _pool(settings: Namespace, classifier: Classifier) -> tuple[list[str], Tensor]:
    """Return the readable files of a folder or table of images to label, and their pixels, uint8 (M, H, W, C)."""
    place = Path(settings.pool).expanduser()
    if place.name.lower().endswith(TABLES):
        files = [str(place.parent / row.path) for row in read_table(place, labelled=False)]
    else:
        files = [file.path for file in find_images([str(place)], sys.stdin.buffer) if file.error is None]
    paths = list(dict.fromkeys(os.path.normpath(Path(file).absolute()) for file in files))
    names, pixels, bad = [], [], []
    for path in paths[: settings.limit]:
        if not is_cell(path):
            bad.append(f"{path} has a name that a table cannot hold")
            continue
        try:
            pixels.append(torch.from_numpy(decode(path, classifier.preparation)))
            names.append(path)
        except DecodeError as error:
            bad.append(str(error))
    if bad:
        note(f"left out {counted(len(bad), 'image')}: {listed(bad)}")
    if not names:
        raise UsageError(f"there are no readable images in {place}: name a folder of images, or a table of them")
    return names, torch.stack(pixels)


def training_command(source: Path, table: Path, labels: Labels, data: ImageData) -> str:
    """Return the command that trains with the reviewed labels and the settings of a run."""
    config = source / "config.yaml"
    words = ["--dataset", data.dataset]
    if config.is_file():
        words = ["--config", display_path(config)]
    if labels.column == "path":
        words += ["--data-dir", display_path(table)]
    else:
        words += ["--data.labels", display_path(table)]
    if data.parts.folds:
        words += ["--data.split.folds", "0"]
    if data.settings.split.group:
        words += ["--data.split.group", "null"]
    return f"cifar-lit train {shlex.join(words)}"
