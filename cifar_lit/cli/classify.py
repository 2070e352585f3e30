"""`cifar-lit classify RUN PATH…`: predict the classes of image files."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from jsonargparse import Namespace
from jsonargparse.typing import PositiveInt
from rich.cells import cell_len

from cifar_lit.base.command_line import add_coverage, add_device, command_parser, parsed
from cifar_lit.base.errors import UsageError
from cifar_lit.base.files import display_path, writing
from cifar_lit.base.hardware import limit_busy_waiting, resolve_device
from cifar_lit.base.memory import keep_freed_memory
from cifar_lit.base.text import note, printable, progress, say
from cifar_lit.data.photos.decode import KINDS

if TYPE_CHECKING:
    from cifar_lit.inference.classify import ImageFile, Row, Write
    from cifar_lit.inference.load import Classifier

_ROW_FILES = {"--csv": ".csv", "--jsonl": ".jsonl"}
_VALUED = ("--top", "--reject", "--coverage", "--accelerator")


def classify(argv: list[str]) -> int:
    """Run `classify`; return 1 if a file could not be read."""
    settings = _settings(argv)
    # Idle torch threads spin on the cores that decode the next images. With sleeping threads, a small net classified
    # images of 640 × 640 twice as fast on two cores. The call has no effect after torch has been imported.
    limit_busy_waiting(sleep_at_once=True)
    from cifar_lit.inference.classify import find_images
    from cifar_lit.inference.load import load
    from cifar_lit.inference.rejection import check_rate
    from cifar_lit.inference.sets import check_coverage

    classifier = load(settings.run, device=resolve_device(settings.accelerator))
    check_rate(settings.reject, classifier.card.reject)
    if settings.reject is not None:
        classifier.reject = settings.reject
    check_coverage(settings.coverage, classifier.card.coverage)
    classifier.coverage = settings.coverage
    keep_freed_memory()
    files = list(find_images(settings.paths, sys.stdin.buffer))
    if not files:
        raise UsageError("the list on standard input is empty: write one path per line")
    try:
        failed = _run(settings, classifier, files)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if failed:
        note(f"cifar-lit: {failed:,} of {len(files):,} files could not be classified; their rows give the reason")
    return int(failed > 0)


def _settings(argv: list[str]) -> Namespace:
    description = (
        "Predict the classes of image files with the net of a run. Print the likeliest classes of each image with "
        f"their probabilities. Read {KINDS} (the first frame), whatever the suffix."
    )
    parser = command_parser("classify", description)
    add = parser.add_argument
    add("run", type=str, metavar="RUN", help="run folder, its model.safetensors, or hf://USER/NAME@REVISION")
    paths = "files, folders, patterns such as '*.jpg' or '**/*.png', or - to read paths from standard input"
    add("paths", type=str, nargs="*", metavar="PATH", help=paths)
    add("--top", type=PositiveInt, default=3, help="number of classes to print for each image")
    csv = "write CSV to this file, or to standard output without a name"
    add("--csv", type=str, nargs="?", const="-", default=None, metavar="FILE.csv", help=csv)
    jsonl = "write one JSON object per line to this file, or to standard output without a name"
    add("--jsonl", type=str, nargs="?", const="-", default=None, metavar="FILE.jsonl", help=jsonl)
    reject = "mark images as unknown at this false-alarm rate, up to 0.5 (default: 0.05)"
    add("--reject", type=float | None, default=None, metavar="RATE", help=reject)
    add_coverage(parser)
    add_device(parser)
    settings = parsed(parser, _sorted_argv(argv))
    if not settings.paths:
        raise UsageError("classify needs a run and images: cifar-lit classify lightning_logs/NAME IMAGES")
    return settings


def _sorted_argv(argv: list[str]) -> list[str]:
    """Return all flags as `--flag=value`, then the run and the paths, because argparse needs adjacent positionals.

    Flags with an optional value always get one. Otherwise the parser would read the next image as their value.
    """
    flags: list[str] = []
    paths: list[str] = []
    remaining = deque(argv)
    while remaining:
        arg = remaining.popleft()
        if arg == "--":
            break
        if arg in _ROW_FILES:
            target = "-"
            if remaining and remaining[0].lower().endswith(_ROW_FILES[arg]):
                target = remaining.popleft()
            flags.append(f"{arg}={target}")
        elif arg in _VALUED and remaining:
            flags.append(f"{arg}={remaining.popleft()}")
        elif arg.startswith("-") and arg != "-" and not os.path.lexists(arg):
            flags.append(arg)
        else:
            paths.append(arg)
    return [*flags, "--", *paths, *remaining]


def _run(settings: Namespace, classifier: Classifier, files: Sequence[ImageFile]) -> int:
    """Classify the files and write rows; return the number of unreadable files."""
    from cifar_lit.inference.classify import classify_files, csv_rows, json_rows
    from cifar_lit.inference.rejection import caveat

    top = min(settings.top, len(classifier.classes))
    failed = 0
    with ExitStack() as stack:
        writers: list[Write] = []
        for target, kind in ((settings.csv, csv_rows), (settings.jsonl, json_rows)):
            if target is not None:
                writers.append(stack.enter_context(_row_file(target, kind, top, len(files))))
        on_stdout = "-" in (settings.csv, settings.jsonl)
        if not writers:
            on_stdout = True
            writers.append(_class_table([file.path for file in files], classifier, top))
        advance = None
        if not (on_stdout and sys.stdout.isatty()):  # a progress bar would mix with rows on the same terminal
            advance = stack.enter_context(progress("classifying", len(files), min_seconds=5.0))
        for rows in classify_files(classifier, files, top):
            for write in writers:
                write(rows)
            failed += sum(row.error is not None for row in rows)
            if advance:
                advance(len(rows))
    if not (settings.csv or settings.jsonl) and classifier.card.reject:
        note(caveat(classifier.reject))
    return failed


@contextmanager
def _row_file(target: str, rows: Callable[[TextIO, int], Write], top: int, count: int) -> Iterator[Write]:
    """Yield a function that writes rows to standard output (-), or to a file that appears only when it is complete."""
    if target == "-":
        yield rows(sys.stdout, top)
        return
    path = Path(target).expanduser()  # shells do not expand ~ after =
    with (
        writing(path, "Choose another place.", parents=True) as partial,
        partial.open("w", newline="", encoding="utf-8") as file,
    ):
        yield rows(file, top)
    note(f"{count:,} rows in {display_path(path)}")


WIDTH = 40  # characters of a column, at most


def _class_table(paths: Sequence[str], classifier: Classifier, top: int) -> Write:
    """Print the head of a table and return a function that prints rows.

    Each column has the width of its widest possible entry, so that rows can be printed as soon as they are classified.
    Entries beyond `WIDTH` move the rest of their own row only.
    """
    class_width = max(7, *(cell_len(printable(name)) for name in classifier.classes))
    path_width = max(cell_len(printable(path)) for path in paths)
    widths = [min(width, WIDTH) for width in (path_width, *[class_width, 6] * top, 7, 0)]

    def show(cells: Sequence[str]) -> None:
        text = ""
        for cell, width in zip(map(printable, cells), widths, strict=False):
            text += cell + " " * max(2, width + 2 - cell_len(cell))
        say(text.rstrip())

    def write(rows: Sequence[Row]) -> None:
        for row in rows:
            cells = [str(row.path)]
            for name, value in row.top:
                cells += (name, f"{value:.3f}")
            if row.error:
                cells.append(row.error)
            cells.append("unknown" if row.unknown else "")
            cells.append(", ".join(row.prediction_set or ()))
            show(cells)

    heads = ["file"]
    for rank in range(1, top + 1):
        heads += (f"class {rank}", f"prob {rank}")
    heads.append("unknown" if classifier.reject is not None else "")
    sets = "prediction set" if classifier.coverage is not None else ""
    if classifier.card.thresholds is not None:
        sets = "labels"
    heads.append(sets)
    show(heads)
    return write
