"""The console for tables and boxes."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from cifar_lit.text import printable


class TextConsole(Console):
    """rich's, but a text is no markup there, has no emoji by name, and nothing that a terminal obeys."""

    def render_str(self, text: str, **settings: Any) -> Text:
        """What becomes of every text that is printed, and of each in a table."""
        return super().render_str(printable(text), **{**settings, "markup": False, "emoji": False})


def for_tables() -> Console:
    """As wide as the terminal; elsewhere so wide that no row is folded, which rich would do at 80 columns."""
    return TextConsole(width=None if sys.stdout.isatty() else 200, highlight=False)
