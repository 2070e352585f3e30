"""The reference is that of the program, and the table of contents is complete."""

import re
import sys
from importlib.metadata import version

import pytest
from contract.command_line import ROOT
from doc_pages import DOCS

sys.path.append(str(DOCS / "reference"))

import generated

PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.glob("**/*.md") if "_build" not in page.parts)
REFERENCE = [page for page in PAGES if generated.BLOCK.search((DOCS / page).read_text())]
LOCKED = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "requirements.lock.txt").read_text(), re.MULTILINE))


def test_the_index_lists_every_page_once() -> None:
    contents = generated.sections((DOCS / "index.md").read_text())
    listed = sorted(page for pages in contents.values() for page in pages if not page.startswith(".."))
    assert listed == [page for page in PAGES if page != "index.md"]


@pytest.mark.parametrize("page", REFERENCE)
def test_the_reference_is_current(page: str) -> None:
    if sys.version_info[:2] != (3, 11) or any(version(name) != LOCKED[name] for name in ("lightning", "jsonargparse")):
        pytest.skip("the texts of another version")
    text = (DOCS / page).read_text()
    assert generated.filled_in(text) == text, "run python docs/reference/generated.py"
    assert " |  |\n" not in text, "describe it in the docstring"
