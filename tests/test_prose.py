"""The mechanical part of the style: how comments begin, and Markdown that can be read as text."""

import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RELATIVE_WORD = re.compile(r"#[\s…]*((and|but) )?(which|of|what|that|as|so that|where|whose|who)\b", re.IGNORECASE)
TITLED_LINK = re.compile(r'\]\(\S+ "')


def tracked(pattern: str) -> list[Path]:
    names = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in names.stdout.split()]


def first_lines_of_comments(path: Path) -> Iterator[tuple[int, str]]:
    previous = (-1, -1)
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                if previous != (row - 1, column):
                    yield row, token.string
                previous = token.start


@pytest.mark.parametrize("folder", ["cifar_lit", "scripts", "tests"])
def test_no_comment_begins_with_a_relative_word(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{row}: {comment}"
        for path in tracked(f"{folder}/*.py")
        for row, comment in first_lines_of_comments(path)
        if RELATIVE_WORD.match(comment)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", tracked("*.md"), ids=lambda page: str(page.relative_to(ROOT)))
def test_markdown_is_readable_as_text(page: Path) -> None:
    in_code = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        in_code ^= line.lstrip().startswith("```")
        free = in_code or line.lstrip().startswith(("|", "```", "<!--"))
        assert free or len(line) <= 100, f"{page}:{number} has {len(line)} characters"
        assert not TITLED_LINK.search(line), f"{page}:{number}: a link with a title"
