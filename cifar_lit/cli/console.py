"""The console for tables and boxes."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.text import Text

from cifar_lit.text import printable


class TextConsole(Console):
    """Console that prints text as it is: no markup, no emoji names, no control characters."""

    def render_str(self, text: str, **settings: object) -> Text:
        """Render a text, also of a table cell."""
        settings |= {"markup": False, "emoji": False}
        return super().render_str(printable(text), **settings)  # type: ignore[arg-type]


def for_tables() -> Console:
    """Return a console as wide as the terminal. Without a terminal, it has 200 columns: rich would wrap rows at 80."""
    return TextConsole(width=None if sys.stdout.isatty() else 200, highlight=False)
