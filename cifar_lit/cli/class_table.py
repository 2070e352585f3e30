"""The table that `cifar-lit classify` prints, row by row as they come."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from cifar_lit.runs.predictions import Row

UNLIKE = "unlike the training images"
ORDINALS = ("class", "second", "third")


class ClassTable:
    """A table whose columns are as wide as their widest entry can be, so that it need not wait for the last row.

    paths: of all rows to come. classes: all names. top: how many a row names.
    """

    def __init__(self, paths: Sequence[str], classes: Sequence[str], top: int) -> None:
        self._path_width = max(4, *(cell_len(printable(path)) for path in paths))
        self._class_width = max(cell_len(printable(name)) for name in classes)
        self._top, self._started = top, False
        note = 80  # of which a reason has fewer letters
        self._width = self._path_width + top * (self._class_width + 8) + note + 2
        self._console = Console(width=None if sys.stdout.isatty() else self._width, highlight=False)

    def write(self, rows: Sequence[Row]) -> None:
        """Prints rows, under the names of the columns if they are the first."""
        table = Table(box=None, show_header=not self._started, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        self._started = True
        table.add_column("file", width=self._path_width, overflow="fold")
        for rank in range(self._top):
            name = ORDINALS[rank] if rank < len(ORDINALS) else f"{rank + 1}th"
            table.add_column(name, width=self._class_width + 6, no_wrap=True)
        table.add_column("", overflow="fold")
        for row in rows:
            table.add_row(Text(printable(row.path or "")), *self._cells(row))
        self._console.print(table)

    def _cells(self, row: Row) -> list[str | Text]:
        if row.error is not None:
            return [*[""] * self._top, Text(row.error, "red")]
        cells: list[str | Text] = [
            Text(f"{printable(name):<{self._class_width}} {probability:.3f}", "" if rank else "bold")
            for rank, (name, probability) in enumerate(row.top)
        ]
        return [*cells, Text(UNLIKE, "yellow") if row.unlike else ""]


def printable(text: str) -> str:
    """A text on one line, with escapes for what is no letter."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
