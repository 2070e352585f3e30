"""`cifar-lit classify RUN PATH…`: what a run's net makes of pictures."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import Namespace
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from cifar_lit.cli.errors import command_parser, parsed
from cifar_lit.data.decode import SUFFIXES, pixel_limit
from cifar_lit.data.progress import progress
from cifar_lit.errors import UsageError
from cifar_lit.files import writing
from cifar_lit.hardware import keep_freed_memory, limit_busy_waiting, resolve_device
from cifar_lit.runs.run_folder import display_path
from cifar_lit.text import note, printable

if TYPE_CHECKING:
    from cifar_lit.inference.classify import ImageFile
    from cifar_lit.inference.load import Classifier
    from cifar_lit.runs.predictions import CsvRows, JsonRows, Row

    Write = Callable[[Sequence[Row]], None]

MAX_PIXELS = 100_000_000  # decoded as RGBA, as many take 0.4 GB, and for a moment about three times that
EXPLAINED = "explained"
MAX_STEM = 200  # bytes of a picture's name in those of its explanation: file systems take 255
_ROW_FILES = {"--csv": ".csv", "--jsonl": ".jsonl"}
_VALUED = ("--top", "--sheet", "--max-pixels", "--device")


def classify(argv: list[str]) -> int:
    """Runs `classify`; returns 1 when a file could not be read. Raises UsageError and Failure."""
    settings = _settings(argv)
    # Let torch's threads sleep where they wait, which they do spinning: they take the cores that decode the next pictures. On two
    # cores it doubled the images/s with a small net and pictures of 640 × 640. Of use before torch is imported only.
    limit_busy_waiting(sleep_at_once=True)
    from cifar_lit.inference.classify import find_images
    from cifar_lit.inference.load import load

    classifier = load(settings.run, device=resolve_device(settings.device))
    keep_freed_memory()
    files = list(find_images(settings.paths, sys.stdin.buffer))
    if not files:
        raise UsageError("the list on standard input is empty: give it a path a line")
    _check_targets(settings, files)
    try:
        with pixel_limit(settings.max_pixels):
            failed = _run(settings, classifier, files)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the rows has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if failed:
        note(f"cifar-lit: {failed:,} of {len(files):,} could not be classified; their rows say why")
    return 1 if failed else 0


def _settings(argv: list[str]) -> Namespace:
    description = (
        "Names what is on pictures, with the net of a run: the likeliest classes of each, with their probabilities. "
        "Reads JPEG, PNG, WebP, BMP and GIF, whatever the suffix; of what moves, the first frame."
    )
    parser = command_parser("classify", description)
    add = parser.add_argument
    add("run", type=str, metavar="RUN", help="a run folder, or its model.safetensors")
    add(
        "paths",
        type=str,
        nargs="*",
        metavar="PATH",
        help="files, folders, patterns such as '*.jpg' or '**/*.png', - for stdin",
    )
    add("--top", type=int, default=3, help="how many classes a row names")
    csv = "write CSV, to stdout if no file is named"
    add("--csv", type=str, nargs="?", const="-", default=None, metavar="FILE.csv", help=csv)
    add(
        "--jsonl",
        type=str,
        nargs="?",
        const="-",
        default=None,
        metavar="FILE.jsonl",
        help="a JSON object a line, likewise",
    )
    add("--sheet", type=str | None, default=None, metavar="FILE.png", help="draw a contact sheet")
    explain = f"draw where each class was found, as --explain=FOLDER, or in {EXPLAINED}/"
    add("--explain", type=str, nargs="?", const=EXPLAINED, default=None, metavar="FOLDER", help=explain)
    add("--max-pixels", type=int, default=MAX_PIXELS, help="refuse larger images, as bombs are")
    add("--device", type=str, default="auto", help="where to compute: auto, cpu, gpu, cuda:1, mps")
    settings = parsed(parser, _sorted_argv(argv))
    if not _may_be_run(settings.run) and (run := next(filter(_may_be_run, settings.paths), None)):
        raise UsageError(f"the run comes before the pictures: cifar-lit classify {run} {settings.run}")
    if not settings.paths:
        if not _may_be_run(settings.run):
            raise UsageError(
                f"classify needs a run before the pictures: cifar-lit classify lightning_logs/NAME {settings.run}"
            )
        raise UsageError(
            "classify what? Name files, folders or patterns after the run, or - for a list on standard input."
        )
    if settings.top < 1 or settings.max_pixels < 1:
        raise UsageError("--top and --max-pixels must be at least 1")
    if settings.csv == "-" and settings.jsonl == "-":
        raise UsageError("--csv and --jsonl cannot both go to standard output: name a file for one of them")
    for name in ("csv", "jsonl", "sheet", "explain"):  # a shell expands no ~ behind =
        if settings[name] not in (None, "-"):
            settings[name] = str(Path(settings[name]).expanduser())
    return settings


def _may_be_run(path: str) -> bool:
    names = ("config.yaml", "model.safetensors")
    return path.endswith(".safetensors") or any(os.path.exists(os.path.join(path, name)) for name in names)


def _sorted_argv(argv: list[str]) -> list[str]:
    """The flags, each with its value attached, then the run and the paths, which the parser wants in one piece.

    Flags whose value may be left out are given one here, so that the pictures after them are not taken for it.
    """
    flags: list[str] = []
    paths: list[str] = []
    rest = deque(argv)
    while rest:
        arg = rest.popleft()
        if arg == "--":
            break
        if arg in _ROW_FILES:
            arg += f"={rest.popleft()}" if rest and rest[0].lower().endswith(_ROW_FILES[arg]) else "=-"
        elif arg == "--explain":
            arg += f"={EXPLAINED}"
        elif arg in _VALUED and rest:
            arg += f"={rest.popleft()}"
        (flags if arg.startswith("-") and arg != "-" else paths).append(arg)
    return (
        [*flags, "--", *paths, *rest]
        if any(path.startswith("-") for path in (*paths, *rest))
        else [*flags, *paths, *rest]
    )


def _check_targets(settings: Namespace, files: Sequence[ImageFile]) -> None:
    """Refuses to write over one of the pictures that are to be classified, or into what is no picture."""
    from cifar_lit.inference.classify import is_picture_name

    if settings.sheet is not None and not is_picture_name(Path(settings.sheet)):
        raise UsageError(f"--sheet {settings.sheet}: name a picture, such as sheet.png")
    for flag in ("csv", "jsonl", "sheet"):
        target = Path(settings[flag] or "-")
        if flag != "sheet" and target.name.lower().endswith(SUFFIXES):
            raise UsageError(f"--{flag}={target} would write rows into a picture: name a .{flag} file")
        if target.is_file() and any(os.path.exists(file.path) and target.samefile(file.path) for file in files):
            raise UsageError(f"--{flag} {target} is among the pictures to classify: choose another file")


def _run(settings: Namespace, classifier: Classifier, files: Sequence[ImageFile]) -> int:
    """Classifies, and writes rows, sheet and explanations; returns how many files could not be read."""
    import torch

    from cifar_lit.inference.classify import MAX_PICTURES, classify_files, contact_sheet, save_picture
    from cifar_lit.inference.explain import activation_maps, draw_explanation
    from cifar_lit.runs.predictions import CsvRows, JsonRows

    top = min(settings.top, len(classifier.classes))
    failed = 0
    sheet_rows: list[Row] = []
    with ExitStack() as stack:
        if settings.explain is not None:  # before anything is written: not every net has maps
            activation_maps(classifier.net, torch.zeros(1, *classifier.card.input_shape, dtype=torch.uint8))
        targets = [
            (target, kind)
            for target, kind in ((settings.csv, CsvRows), (settings.jsonl, JsonRows))
            if target is not None
        ]
        writers = [stack.enter_context(_row_file(target, kind, top, len(files))) for target, kind in targets]
        if not targets:
            writers.append(_class_table([file.path for file in files], classifier.classes, top))
        # a bar would be drawn into rows that appear on the same terminal
        quiet = sys.stdout.isatty() and (not targets or "-" in (settings.csv, settings.jsonl))
        advance = stack.enter_context(
            nullcontext(None) if quiet else progress("classifying", len(files), min_seconds=5.0)
        )
        for rows, images in classify_files(classifier, files, top):
            for write in writers:
                write(rows)
            if settings.explain is not None and len(images):
                readable = (row for row in rows if row.error is None)
                for row, image, activation in zip(
                    readable, images, activation_maps(classifier.net, images), strict=True
                ):
                    stem = Path(row.path or "").stem.encode(errors="ignore")[:MAX_STEM].decode(errors="ignore")
                    name = f"{row.index:05}-{stem}.png"
                    save_picture(draw_explanation(row, image, activation), Path(settings.explain) / name)
            sheet_rows += rows[: MAX_PICTURES - len(sheet_rows)]
            failed += sum(row.error is not None for row in rows)
            if advance:
                advance(len(rows))
    if settings.sheet is not None:
        save_picture(contact_sheet(sheet_rows), Path(settings.sheet))
        first = f"the first {len(sheet_rows):,} of " if len(sheet_rows) < len(files) else ""
        note(f"{first}{len(files):,} files on {display_path(Path(settings.sheet))}")
    if settings.explain is not None:
        note(f"{len(files) - failed:,} pictures in {display_path(Path(settings.explain))}/")
    return failed


@contextmanager
def _row_file(target: str, kind: type[CsvRows] | type[JsonRows], top: int, count: int) -> Iterator[Write]:
    """Writes rows to a file, which is there as a whole at the end or not at all, or to standard output (-)."""
    if target == "-":
        yield kind(sys.stdout, top).write
        return
    path = Path(target)
    with (
        writing(path, "Choose another place.", parents=True) as partial,
        partial.open("w", newline="", encoding="utf-8") as file,
    ):
        yield kind(file, top).write
    note(f"{count:,} rows in {display_path(path)}")


def _class_table(paths: Sequence[str], classes: Sequence[str], top: int) -> Write:
    """Prints the head of a table; returns what prints its rows.

    Its columns are as wide as their widest entry can be, so that it need not wait for the last row.
    """
    class_width = max(cell_len(printable(name)) for name in classes)
    widths = [max(4, *(cell_len(printable(path)) for path in paths)), *[class_width + 6] * top]
    console = Console(highlight=False, soft_wrap=True)

    def print_cells(cells: list[Text], remark: str = "", style: str = "") -> None:
        cells += [Text() for _ in widths[len(cells) :]]
        for cell, width in zip(cells, widths, strict=True):
            cell.truncate(width, pad=True)
        console.print(Text("  ").join([*cells, Text(printable(remark), style)]))

    def write(rows: Sequence[Row]) -> None:
        for row in rows:
            cells = [Text(f"{set_cell_size(printable(name), class_width)} {value:.3f}") for name, value in row.top]
            for best in cells[:1]:
                best.stylize("bold")
            remark = row.error or ("unlike the training images" if row.unlike else "")
            print_cells([Text(printable(row.path or "")), *cells], remark, "red" if row.error else "yellow")

    names = ["file", "class", "second", "third", *(f"{rank}th" for rank in range(4, top + 1))][: top + 1]
    print_cells([Text(name, "bold") for name in names])
    return write
