"""The decisions of a review: a journal of JSON lines in the run folder."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from cifar_lit.base.errors import Failure
from cifar_lit.base.files import display_path, is_below
from cifar_lit.base.text import counted, note

JOURNAL = "review.jsonl"


class Decision(NamedTuple):
    """What a reviewer decided about an image."""

    image: str  # absolute path, or row of a data set without files
    action: str  # keep, relabel, drop or skip
    label: str | None  # class or labels after `keep` and `relabel`, else None
    date: str  # ISO 8601
    new: bool  # whether the image is not part of the run's data


class Journal:
    """The latest decision about each image. A decision is on disk before `decide` returns.

    The attribute `classes` has the classes of the run, and those that decisions have added. Several labels of an image
    have `|` between them.

    Raise Failure if a line of the file is damaged, or the file is a symlink pointing outside of its folder.
    """

    def __init__(self, path: Path, classes: Sequence[str]) -> None:
        if not is_below(path.name, path.parent):
            raise Failure(f"{path} is a symlink pointing outside: replace it with a copy of its target")
        self._path = path
        self.decisions: dict[str, Decision] = {}
        self.classes = list(classes)
        path.touch()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                self._add(Decision(**json.loads(line)))
            except (ValueError, TypeError):
                fault = f"{path}, line {number} is not a decision"
                raise Failure(f"{fault}: remove the line, or move the file away to start again") from None

    def decide(self, made: Decision) -> None:
        """Append a decision. Raise OSError if it cannot be stored."""
        size = self._path.stat().st_size
        try:
            with self._path.open("a", encoding="utf-8", newline="\n") as file:
                file.write(json.dumps(made._asdict()) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            os.truncate(self._path, size)  # the next line must not continue an incomplete one
            raise
        self._add(made)

    def adopt(self, earlier: Path, images: Collection[str]) -> None:
        """Store the decisions of an earlier journal, if there is one, about images that have none here."""
        if not earlier.is_file():
            return
        before = len(self.decisions)
        for image, made in Journal(earlier, ()).decisions.items():
            if image in images and image not in self.decisions:
                self.decide(made)
        if added := len(self.decisions) - before:
            note(f"{counted(added, 'decision')} taken over from {display_path(earlier)}")

    def _add(self, made: Decision) -> None:
        self.decisions[made.image] = made
        if made.label is not None:
            self.classes += [name for name in made.label.split("|") if name and name not in self.classes]
