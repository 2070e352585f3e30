"""The decisions of a review: a journal of JSON lines, and the table of labels that follows from it."""

from __future__ import annotations

import csv
import errno
import json
import os
from collections.abc import Collection, Mapping, Sequence
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from cifar_lit.errors import Failure
from cifar_lit.files import open_inside, read_bytes, writing
from cifar_lit.text import csv_cell, is_name

JOURNAL, TABLE = "review.jsonl", "labels-reviewed.csv"  # in the run folder
SPLITS = ("train", "val", "test")
ACTIONS = ("keep", "relabel", "drop", "skip")
MAX_BYTES = 1 << 25  # more than 100,000 decisions, read in two seconds


class Decision(NamedTuple):
    """What a reviewer decided about an image."""

    image: str  # absolute path, or row of a data set without files
    action: str  # one of `ACTIONS`
    label: str | None  # class after `keep` and `relabel`, else None
    date: str  # ISO 8601
    new: bool  # whether the image is not part of the run's data


class Journal:
    """The decisions of a run, in order. Each one is on disk before `decide` or `undo` returns.

    `undo` and `add_class` append a line too. No line of an existing file is changed or removed.

    Args:
        path: the file, created if it is missing.
        classes: names of the classes of the run.

    Attributes:
        classes: these, and the classes that were added.

    Raises:
        Failure: the file cannot be written, or one of its lines is damaged.
    """

    def __init__(self, path: Path, classes: Sequence[str]) -> None:
        self._path = path
        try:
            self._file = open_inside(path, "a+b", buffering=0)
            if os.fstat(self._file.fileno()).st_size > MAX_BYTES:
                raise OSError(0, f"it is larger than {MAX_BYTES >> 20} MiB")
            self._file.seek(0)
            data = self._file.read()
            self._made, self.classes = _replay(path, data, classes)
            if data and not data.endswith(b"\n"):  # an editor may leave out the last newline
                self._file.write(b"\n")
        except OSError as error:
            raise Failure(f"decisions cannot be stored in {path} ({error.strerror}): move it away") from None

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

    def add_class(self, name: str) -> None:
        """Add a class. Raise ValueError if a table cannot hold the name, OSError if it cannot be stored."""
        _check_class(name)
        self._append({"class": name})
        self.classes.append(name)

    def _append(self, entry: Mapping[str, Any]) -> None:
        status = os.fstat(self._file.fileno())
        if not self._path.is_file() or not os.path.samestat(status, self._path.stat()):
            raise OSError(errno.ENOENT, f"{self._path} was deleted or replaced")
        line = memoryview(json.dumps(entry).encode() + b"\n")
        if status.st_size + len(line) > MAX_BYTES:  # it could not be read again
            raise OSError(errno.EFBIG, f"{self._path} is full")
        try:
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
    """Return the images that a journal keeps, relabels or drops, without changing the file; none without a journal.

    Raise Failure if it cannot be read.
    """
    try:
        data = read_bytes(path, MAX_BYTES) if path.exists() and path.stat().st_size else b""
    except OSError as error:
        raise Failure(f"{path} cannot be read: {error.strerror}") from None
    latest = {made.image: made.action for made in _replay(path, data, classes)[0]}
    return {image for image, action in latest.items() if action != "skip"}


def _replay(path: Path, data: bytes, classes: Sequence[str]) -> tuple[list[Decision], list[str]]:
    """Return the decisions of a journal, in order, and all classes."""
    made: list[Decision] = []
    names = dict.fromkeys(classes)
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():  # from an editor
            continue
        try:
            entry = json.loads(line)
            if entry.keys() == {"undo"}:
                if made.pop().image != entry["undo"]:
                    raise ValueError(entry)
            elif entry.keys() == {"class"}:
                _check_class(entry["class"])
                names[entry["class"]] = None
            else:
                made.append(_decision(entry, names))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            fault = f"{path}, line {number} is not a decision about these classes"
            raise Failure(f"{fault}: remove the line, or move the file away to start again") from None
    return made, list(names)


def _decision(entry: Any, classes: Collection[str]) -> Decision:
    """Return the decision of a line. Raise an exception if it is invalid."""
    made = Decision(**entry)
    has_label = made.label in classes if made.action in ("keep", "relabel") else made.label is None
    has_date = date.fromisoformat(made.date).isoformat() == made.date
    if made.action not in ACTIONS or not (has_label and has_date and is_cell(made.image)) or type(made.new) is not bool:
        raise ValueError(entry)
    return made


def _check_class(name: Any) -> None:
    """Raise ValueError if a table cannot hold the name of a class."""
    if not is_name(name) or not is_cell(name):
        raise ValueError(name)


def is_cell(name: str) -> bool:
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
    groups: Sequence[object] = ()  # images with equal values belong on one side of a split; None for no group

    def check(self) -> None:
        """Raise Failure for names that a spreadsheet would change or run."""
        for name in (*self.keys, *dict.fromkeys((*self.labels, *self.dates.values()))):
            if not is_cell(name):
                raise Failure(f"{name[:200]!r} cannot be written to a table: rename it; after that, train again")

    def with_split_of(self, earlier: Mapping[str, str], decisions: Collection[str]) -> tuple[Labels, int] | None:
        """Return the labels with the split of an earlier table, and how many images it lacks; None if it has none.

        earlier: splits by key, as text from the table. decisions: keys of all images with a decision.

        A split drawn from a folder changes with its files, so the table keeps its own. An image added since is on the
        side of its group, else on that of the present split. A dropped image that is kept now is trained on.
        """
        sides = [earlier.get(key, "") for key in self.keys]
        sides = [side if side in SPLITS else "" for side in sides]
        if self.extra != "split" or not any(sides):  # without any, the images were moved
            return None
        groups = self.groups or [None] * len(sides)
        by_group = {group: side for group, side in zip(groups, sides, strict=True) if side}
        by_group.pop(None, None)
        added = 0
        for place, key in enumerate(self.keys):
            if not sides[place]:
                added += key not in decisions
                present = "train" if key in decisions else self.values[place]
                sides[place] = by_group.get(groups[place], present)
        return self._replace(values=sides), added

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
