"""The decisions of a review: a journal of JSON lines, and the table of labels that follows from it."""

from __future__ import annotations

import csv
import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cifar_lit.errors import Failure
from cifar_lit.files import writing
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
    """The decisions of a run. Each one is on disk before `decide` or `undo` returns.

    A line that a killed process left incomplete is removed. `undo` appends a line too.

    Args:
        path: the file, created if it is missing.
        classes: names of the classes.

    Raises:
        Failure: the file cannot be written, or one of its lines is damaged.
    """

    def __init__(self, path: Path, classes: Sequence[str]) -> None:
        self._path, self._decided = path, list[Decision]()
        try:
            self._file = open(path, "a+b", 0, opener=lambda name, flags: os.open(name, flags | _FLAGS, 0o666))  # noqa: SIM115
            status = os.fstat(self._file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                raise OSError(0, f"it is not a file of at most {MAX_BYTES >> 20} MiB")
            self._file.seek(0)
            data = self._file.read()
            self._file.truncate(data.rfind(b"\n") + 1)
        except OSError as error:
            raise Failure(f"the decisions cannot be stored in {path}: {error.strerror}") from None
        for number, line in enumerate(data.split(b"\n")[:-1], 1):
            try:
                self._apply(json.loads(line), classes)
            except (ValueError, LookupError, TypeError, RecursionError):
                fault = f"{path}, line {number} is not a decision about these classes"
                raise Failure(f"{fault}: remove the line, or move the file away to start again") from None

    def _apply(self, entry: Any, classes: Sequence[str]) -> None:
        """Repeat a line of the file. Raise ValueError, LookupError or TypeError if it is invalid."""
        if entry.keys() == {"undo"}:
            self._decided.pop()
            return
        decision = Decision(**entry)
        has_label = decision.action in ("keep", "relabel")
        if decision.action not in ACTIONS or has_label != (decision.label in classes):
            raise ValueError(entry)
        if not (isinstance(decision.image, str) and isinstance(decision.date, str) and isinstance(decision.new, bool)):
            raise TypeError(entry)
        self._decided.append(decision)

    @property
    def decisions(self) -> dict[str, Decision]:
        """The last decision about each image."""
        return {decision.image: decision for decision in self._decided}

    def decide(self, decision: Decision) -> None:
        """Append a decision. Raise OSError if it cannot be stored."""
        self._append(decision._asdict())
        self._decided.append(decision)

    def undo(self) -> Decision | None:
        """Take back the last decision and return it; None if there is none. Raise OSError if that cannot be stored."""
        if not self._decided:
            return None
        self._append({"undo": self._decided[-1].image})
        return self._decided.pop()

    def _append(self, entry: Mapping[str, Any]) -> None:
        size = os.fstat(self._file.fileno()).st_size
        line = json.dumps(entry).encode() + b"\n"
        try:
            if self._file.write(line) < len(line):
                raise OSError(0, "the disk is full")
            os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(size)  # a later line must not continue an incomplete one
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Labels(NamedTuple):
    """The labels of a run's data, and the split that a new training keeps."""

    column: str  # `path`, or `image` for a data set without files
    keys: Sequence[str]  # as in `Decision.image`
    labels: Sequence[str]
    splits: Sequence[str]  # train, val or test; empty if the split is drawn anew
    groups: Sequence[str]  # images that stay on one side of a split; empty without groups

    def check(self) -> None:
        """Raise Failure for names that a table cannot hold, because a spreadsheet would change or run them."""
        for name in (*self.keys, *dict.fromkeys(self.labels)):
            if csv_cell(name) != name or name != name.strip():
                raise Failure(f"{name[:200]!r} cannot be written to a table: rename it, and train again")

    def write(self, path: Path, decisions: Mapping[str, Decision]) -> int:
        """Write the table of reviewed labels, without dropped images; return its number of rows.

        Columns: `path` or `image`, `label`, `original_label`, `reviewed` (date, empty if the image was not reviewed),
        and if they are not empty `split` and `group`. New images have no original label and are in the part `train`.
        """
        rows = []
        splits, groups = ([values] if values else [] for values in (self.splits, self.groups))
        for key, label, *more in zip(self.keys, self.labels, *splits, *groups, strict=True):
            decision = decisions.get(key)
            if decision is None or decision.action == "skip":
                rows.append([key, label, label, "", *more])
            elif decision.label is not None:
                rows.append([key, decision.label, label, decision.date, *more])
        known = set(self.keys)
        for new in decisions.values():
            if new.new and new.label is not None and new.image not in known:
                more = [*(["train"] if self.splits else []), *([f"new {new.image}"] if self.groups else [])]
                rows.append([new.image, new.label, "", new.date, *more])
        header = [self.column, "label", "original_label", "reviewed", *["split" for _ in splits]]
        with (
            writing(path, "Free some space, or make the folder writable.") as partial,
            partial.open("w", newline="", encoding="utf-8") as file,
        ):
            csv.writer(file, lineterminator="\n").writerows([[*header, *["group" for _ in groups]], *rows])
        return len(rows)
