"""`cifar-lit review RUN`: check labels in the browser, the most suspicious first, and write a table to train with."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import Namespace
from jsonargparse.typing import NonNegativeInt

from cifar_lit.base.command_line import add_data_dir, add_device, command_parser, parsed
from cifar_lit.base.errors import UsageError, check_packages
from cifar_lit.base.files import display_path, read_json
from cifar_lit.base.hardware import resolve_device
from cifar_lit.base.settings import plain_values
from cifar_lit.base.text import counted, note, quoted, say
from cifar_lit.data.photos.table import read_table
from cifar_lit.extras.label.journal import JOURNAL, Journal
from cifar_lit.extras.label.queue import make_queue
from cifar_lit.extras.label.table import TABLE, Labels, current_labels
from cifar_lit.inference.load import load
from cifar_lit.inference.model_file import weights_file
from cifar_lit.run.folder import RunFolder
from cifar_lit.run.images import run_image_data

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
    if run.is_file():  # its model.safetensors
        run = run.parent
    source = run  # the folder with a net and a config.yaml
    if (run / "folds.json").is_file():
        source = _first_fold(run)
    classifier = load(weights_file(source), resolve_device(settings.accelerator))
    data = run_image_data(source, classifier.card, settings.data_dir, all_classes=True)
    labels = current_labels(data)
    table = run / TABLE
    command = training_command(source, table, labels, data)
    folder = RunFolder(run.parent, run.name, run)
    try:
        journal = Journal(run / JOURNAL, data.classes)
        for earlier in _earlier_journals(source, data):
            journal.adopt(earlier, {*labels.keys})
        if data.has_several_labels and labels.column == "image":
            raise UsageError(f"review corrects several labels of your own pictures, and {data.dataset} has none")
        labels = _with_earlier_split(labels, table, journal)
        write = partial(labels.write, table, journal.decisions)
        if not settings.export:
            from cifar_lit.extras.label.app import PAGE, Review
            from cifar_lit.extras.web import THIS_MACHINE, Server, application, listen

            write()  # a killed review did not
            with listen("127.0.0.1", settings.port) as sock:
                queue = make_queue(run, classifier, data, labels, settings.pool, settings.limit or None)
                about = {
                    "run": display_path(run), "command": command, "open": labels.column == "path",
                    "several": data.has_several_labels,
                }  # fmt: skip
                root = f"/{secrets.token_urlsafe(16)}"  # known only to the reader of the console
                app = application(Review(queue, journal, write, about).routes, PAGE, THIS_MACHINE, root)
                address = f"http://127.0.0.1:{sock.getsockname()[1]}{root}/"
                say(f"{counted(len(queue.keys), 'image')} to review at {address} · stop with Ctrl-C")
                Server(app).run([sock])
        _note_strange(journal, labels)
        rows = write()
    finally:
        folder.release()
    decisions = counted(len(journal.decisions), "decision")
    say(f"{decisions} · {rows:,} rows in {display_path(table)}", f"train with them: {command}")


def _settings(argv: list[str]) -> Namespace:
    parser = command_parser("review", DESCRIPTION)
    add = parser.add_argument
    add("run", type=str, help="run folder, or the folder of a cross-validation")
    add("--pool", type=str | None, default=None, help="label the images of a folder, or of a table with a column path")
    add("--limit", type=NonNegativeInt, default=1000, help="most images to show; 0 for all")
    add("--export", action="store_true", help="only write labels-reviewed.csv from the decisions so far")
    add("--port", type=int, default=8001, help="port of this machine to listen on; 0 for a free one")
    add_data_dir(parser)
    add_device(parser)
    settings = parsed(parser, argv)
    if not settings.export:
        check_packages("review", ("starlette", "uvicorn"), "serve")
    return settings


def _first_fold(folder: Path) -> Path:
    """Return the run of the first fold of a cross-validation, which lies beside its folder."""
    return folder.absolute().parent / Path(read_json(folder / "folds.json")["folds"][0]).name


def _earlier_journals(source: Path, data: ImageData) -> Iterator[Path]:
    """Yield where the reviews of the runs are that this one comes from, by its table of labels or its weights."""
    weights = None
    if (source / "config.yaml").is_file():
        weights = (plain_values(source / "config.yaml").get("finetune") or {}).get("weights")
    for origin in (data.settings.root, data.settings.images.labels, weights):
        place = Path(str(origin or source))
        yield place / JOURNAL if place.is_dir() else place.with_name(JOURNAL)


def _note_strange(journal: Journal, labels: Labels) -> None:
    """Print how many decisions are about images that the data set does not have."""
    strange = {made.image for made in journal.decisions.values() if not made.new}.difference(labels.keys)
    if strange:
        note(f"{counted(len(strange), 'decision')} without effect: this data set has no {min(strange)}")


def _with_earlier_split(labels: Labels, table: Path, journal: Journal) -> Labels:
    """Return the labels with the split of the table of an earlier review."""
    if not table.is_file():
        return labels
    earlier = {row.path: row.split for row in read_table(table, separator="|").rows if row.split}
    split = labels.with_split_of(earlier)
    added = {*labels.keys} - earlier.keys() - journal.decisions.keys()
    if added and split is not labels:
        note(f"{counted(len(added), 'image')} added to {display_path(table)}, which keeps its split")
    return split


def training_command(source: Path, table: Path, labels: Labels, data: ImageData) -> str:
    """Return the command that trains with the reviewed labels and the settings of a run."""
    words = ["--config", display_path(source / "config.yaml")]
    if labels.column == "path":
        words += ["--data-dir", display_path(table)]
        if data.has_several_labels:
            words += ["--data.separator", "|"]
        elif any(re.search("[|;,]", name) for name in data.classes):
            words += ["--data.separator", ""]
    else:
        words += ["--data.labels", display_path(table)]
    if data.parts.folds:
        words += ["--data.split.folds", "0"]
    return f"cifar-lit train {quoted(*words)}"
