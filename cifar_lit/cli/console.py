"""The console for tables and boxes."""

from __future__ import annotations

import os
import sys
import textwrap

from rich.console import Console
from rich.text import Text

from cifar_lit.base.text import printable, say


class TextConsole(Console):
    """Console that prints text as it is: no markup, no emoji names, no control characters."""

    def render_str(self, text: str, **settings: object) -> Text:
        """Render a text, also of a table cell."""
        settings |= {"markup": False, "emoji": False}
        return super().render_str(printable(text), **settings)  # type: ignore[arg-type]


WIDTH = 80  # characters of a line of text, unless a path is longer


def say_wrapped(*texts: str, indent: int = 4) -> None:
    """Print texts as lines of at most `WIDTH` characters, broken at blanks, but not at those of `unbroken`.

    indent: blanks before the second line of a text and further ones.
    """
    wrapper = textwrap.TextWrapper(WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)
    wrapper.break_long_words = False
    for text in texts:
        say(*(line.replace("\xa0", " ") for line in wrapper.wrap(text)))


def unbroken(text: str) -> str:
    """Return text that `say_wrapped` keeps on one line, such as a path."""
    return text.replace(" ", "\xa0")


def for_tables() -> Console:
    """Return a console as wide as the terminal. Without a terminal and the variable COLUMNS, it has 80 columns."""
    is_known = "COLUMNS" in os.environ or sys.stdout is None or sys.stdout.isatty()
    return TextConsole(width=None if is_known else WIDTH, highlight=False)
