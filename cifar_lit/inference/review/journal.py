"""The decisions of a review: a journal of JSON lines, and the table of labels that follows from it."""

from __future__ import annotations

import csv
import errno
import json
import os
import stat
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from cifar_lit.errors import Failure
from cifar_lit.files import read_bytes, writing
from cifar_lit.text import csv_cell

JOURNAL, TABLE = "review.jsonl", "labels-reviewed.csv"  # in the run folder
ACTIONS = ("keep", "relabel", "drop", "skip")
MAX_BYTES = 1 << 28
_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # a run may come from anyone: no links, no pipes


class Decision(NamedTuple):
    """What a reviewer decided about an image."""

    image: str  # absolute path, or row of a data set without files
    action: str  # one of `ACTIONS`
    label: str | None  # class after `keep` and `relabel`
    date: str  # ISO 8601
    new: bool  # whether the image is not part of the run's data


class Journal:
    """The decisions of a run, in order. Each one is on disk before `decide` or `undo` returns.

    `undo` appends a line too. An incomplete last line of a killed process is removed.

    Args:
        path: the file, created if it is missing.
        classes: names of the classes.

    Raises:
        Failure: the file cannot be written, or one of its lines is damaged.
    """

    def __init__(self, path: Path, classes: Sequence[str]) -> None:
        try:
            self._file = open(path, "a+b", 0, opener=lambda name, flags: os.open(name, flags | _FLAGS, 0o666))  # noqa: SIM115
            status = os.fstat(self._file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                raise OSError(0, f"it is not a file of at most {MAX_BYTES >> 20} MiB")
            self._file.seek(0)
            data = self._file.read()
            self._file.truncate(data.rfind(b"\n") + 1)
        except OSError as error:
            raise Failure(f"decisions cannot be stored in {path} ({error.strerror}): move it away") from None
        self._made = _replay(path, data, classes)

    @property
    def decisions(self) -> dict[str, Decision]:
        """The latest decision about each image."""
        return {decision.image: decision for decision in self._made}

    def decide(self, decision: Decision) -> None:
        """Append a decision. Raise OSError if it cannot be stored."""
        self._append(decision._asdict())
        self._made.append(decision)

    def undo(self) -> Decision | None:
        """Undo the latest decision and return it; None if there is none. Raise OSError if that cannot be stored."""
        if not self._made:
            return None
        self._append({"undo": self._made[-1].image})
        return self._made.pop()

    def _append(self, entry: Mapping[str, Any]) -> None:
        status = os.fstat(self._file.fileno())
        if not status.st_nlink:
            raise OSError(errno.ENOENT, f"{self._file.name} was deleted")
        try:
            line = memoryview(json.dumps(entry).encode() + b"\n")
            while line:  # a nearly full disk takes only a part
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(status.st_size)  # the next line must not continue an incomplete one
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def decided_images(path: Path, classes: Sequence[str]) -> set[str]:
    """Return the images that a journal keeps, relabels or drops, without changing the file; none without a journal."""
    try:
        data = read_bytes(path, MAX_BYTES)
    except OSError:  # missing or empty
        return set()
    latest = {made.image: made.action for made in _replay(path, data, classes)}
    return {image for image, action in latest.items() if action != "skip"}


def _replay(path: Path, data: bytes, classes: Sequence[str]) -> list[Decision]:
    """Return the decisions of a journal, in order, without an incomplete last line."""
    made: list[Decision] = []
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            entry = json.loads(line)
            if entry.keys() == {"undo"}:
                made.pop()
            else:
                made.append(_decision(entry, classes))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            fault = f"{path}, line {number} is not a decision about these classes"
            raise Failure(f"{fault}: remove the line, or move the file away to start again") from None
    return made


def _decision(entry: Any, classes: Sequence[str]) -> Decision:
    """Return the decision of a line. Raise an exception if it is invalid."""
    made = Decision(**entry)
    date.fromisoformat(made.date)
    has_label = made.action in ("keep", "relabel")
    if made.action not in ACTIONS or has_label != (made.label in classes) or not _is_cell(made.image):
        raise ValueError(entry)
    return made


def _is_cell(name: str) -> bool:
    """Return whether a name stands unchanged in a table, and no spreadsheet runs it as a formula."""
    return csv_cell(name) == name == name.strip()


class Labels(NamedTuple):
    """The labels of a run's data, training and validation images first."""

    column: str  # `path`, or `image` for a data set without files
    keys: Sequence[str]  # see `Decision.image`
    labels: Sequence[str]
    extra: str  # a further column: `split` to keep train, val and test, or `group`; empty for none
    values: Sequence[str]  # cells of the further column
    dates: Mapping[str, str] = MappingProxyType({})  # by key: decisions in earlier reviews

    def check(self) -> None:
        """Raise Failure for names that a spreadsheet would change or run."""
        for name in (*self.keys, *dict.fromkeys((*self.labels, *self.dates.values()))):
            if not _is_cell(name):
                raise Failure(f"{name[:200]!r} cannot be written to a table: rename it; after that, train again")

    def write(self, path: Path, decisions: Mapping[str, Decision]) -> int:
        """Write the table of reviewed labels without dropped images; return its number of rows.

        Columns: `path` or `image`, `label`, `original_label`, `reviewed` (date, empty if the image was never reviewed)
        and `extra`. New images have no original label, and are training images.
        """
        known = {*self.keys}
        rows = [[self.column, "label", "original_label", "reviewed", self.extra]]
        for key, label, value in zip(self.keys, self.labels, self.values or [""] * len(self.keys), strict=True):
            made = decisions.get(key)
            if made is None or made.action == "skip":
                rows.append([key, label, label, self.dates.get(key, ""), value])
            elif made.label is not None:
                rows.append([key, made.label, label, made.date, value])
        for made in decisions.values():
            if made.new and made.label is not None and made.image not in known:
                rows.append([made.image, made.label, "", made.date, "train" if self.extra == "split" else made.image])
        with (
            writing(path, "Free some space, or make the folder writable.") as partial,
            partial.open("w", newline="", encoding="utf-8") as file,
        ):
            csv.writer(file, lineterminator="\n").writerows(rows if self.extra else [row[:-1] for row in rows])
        return len(rows) - 1
