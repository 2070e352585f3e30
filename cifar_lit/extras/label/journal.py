"""The decisions of a review: a journal of JSON lines in the run folder."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Collection, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from cifar_lit.errors import Failure
from cifar_lit.files import read_bytes, without_links
from cifar_lit.text import csv_cell, is_name

JOURNAL = "review.jsonl"
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

    `undo` and `add_class` append a line too. No line of an existing file is changed or removed. The attribute
    `classes` has the classes of the run and those that were added.

    Raise Failure if the file cannot be created or written, or one of its lines is damaged.
    """

    def __init__(self, path: Path, classes: Sequence[str]) -> None:
        self._path = path
        try:
            self._file = open(path, "a+b", buffering=0, opener=without_links)  # noqa: SIM115
            data = b""
            if path.stat().st_size:
                data = read_bytes(path, MAX_BYTES)
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

    def add_class(self, name: object) -> None:
        """Add a class. Raise ValueError if a table cannot hold the name, OSError if it cannot be stored."""
        checked = _class_name(name)
        self._append({"class": checked})
        self.classes.append(checked)

    def _append(self, entry: Mapping[str, object]) -> None:
        status = os.fstat(self._file.fileno())
        if not self._path.is_file() or not os.path.samestat(status, self._path.stat()):
            raise OSError(errno.ENOENT, f"{self._path} was deleted or replaced")
        line = memoryview(json.dumps(entry).encode() + b"\n")
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


def _replay(path: Path, data: bytes, classes: Sequence[str]) -> tuple[list[Decision], list[str]]:
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
                names[_class_name(entry["class"])] = None
            else:
                made.append(_decision(entry, names))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            fault = f"{path}, line {number} is not a decision about these classes"
            raise Failure(f"{fault}: remove the line, or move the file away to start again") from None
    return made, list(names)


def _decision(entry: Mapping[str, Any], classes: Collection[str]) -> Decision:
    """Return the decision of a line. Raise an exception if it is invalid."""
    made = Decision(**entry)
    if made.action not in ACTIONS or not isinstance(made.new, bool):
        raise ValueError(entry)
    if date.fromisoformat(made.date).isoformat() != made.date or not is_cell(made.image):
        raise ValueError(entry)
    if made.action in ("keep", "relabel"):
        if made.label not in classes:
            raise ValueError(entry)
    elif made.label is not None:
        raise ValueError(entry)
    return made


def _class_name(name: object) -> str:
    """Return the name of a class. Raise ValueError if a table cannot hold it."""
    if not isinstance(name, str) or not is_name(name) or not is_cell(name):
        raise ValueError(name)
    return name


def is_cell(name: str) -> bool:
    """Return whether a name stands unchanged in a table, and no spreadsheet runs it as a formula."""
    return csv_cell(name) == name == name.strip()
