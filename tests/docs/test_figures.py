"""Measured figures of the pages and of the recipe headers match their JSON files, and none is typed by hand."""

import re
import sys
from pathlib import Path

import pytest
from contract.command_line import ROOT

sys.path.append(str(ROOT / "scripts" / "benchmarks"))

import table

RESULTS = ROOT / "results"
PAGES = [*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").glob("**/*.md"))]
# Generated blocks and code hold no typed figures.
NOT_TYPED = re.compile(r"```.*?```|<!-- (results|generated).*?<!-- /\1 -->|<!--.*?-->|`[^`\n]+`", re.DOTALL)
MEASURED = re.compile(r"\d[.,]\d+ ?(?:%|×|m?s\b|images/s|points)|± \d+\.\d*[1-9]")


def test_figures_match_their_files() -> None:
    texts = table.updated_pages(ROOT)
    stale = [str(page.relative_to(ROOT)) for page, text in texts.items() if text != page.read_text()]
    assert stale == [], "run python scripts/benchmarks/table.py"


def test_every_table_is_shown_and_every_file_is_listed() -> None:
    pages = "\n".join(page.read_text() for page in [*PAGES, *RESULTS.glob("**/*.md")])
    assert [key for key in table.read_tables(RESULTS) if f"<!-- results: {key} -->" not in pages] == []
    index = (RESULTS / "README.md").read_text() + (RESULTS / "gpu" / "README.md").read_text()
    files = [path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.*") if path.suffix != ".md"]
    assert [file for file in sorted(files) if f"`{file}`" not in index] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_measured_figure_is_typed_by_hand(page: Path) -> None:
    text = NOT_TYPED.sub("", page.read_text())
    assert [line for line in text.splitlines() if MEASURED.search(line)] == []
