"""Measured figures of the pages and of the recipe headers match their JSON files; a typed one is listed here."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from contract.command_line import ROOT

sys.path.append(str(ROOT / "scripts" / "benchmarks"))

import page_tables
import table

from cifar_lit.errors import UsageError

RESULTS = ROOT / "results"
PAGES = [*sorted(ROOT.glob("README*.md")), RESULTS / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RECIPES = sorted((ROOT / "cifar_lit" / "recipes").glob("*.yaml"))
UNITS = r"%|×(?! ?\d)|ms\b|s\b|min\b|minutes?\b|seconds?\b|hours?\b|images/s|MB\b|points?\b|times\b|million\b"
UNITS += "|秒|分钟|小时|倍"  # Chinese pages
NUMBER = re.compile(rf"(?<![\w.])\d[\d.,]*(?: … [\d.,]+)? ?(?:{UNITS})|\b(?:tenth|third|fifth|quarter)s?\b")
HEADER_FIELDS = ("Score", "Time", "Hardware", "Date")
# Generated blocks, code and the names of confidence intervals hold no typed figures.
NOT_TYPED = re.compile(
    r"```.*?```|<!-- results.*?<!-- /results -->|<!--.*?-->|`[^`\n]+`"
    r"|95 % (?:confidence |Wilson )?intervals?|95% 置信区间",
    re.DOTALL,
)

AIM = "an aim, not a result"
ARCHIVE = "size of the published archive"
ROUNDED = "rounded; a table has the figure"
RECORD = "published by others"
EXEMPT: dict[str, dict[str, str]] = {  # page: typed words and the reason
    "README.md": {
        "170 MB": ARCHIVE,
        "about 20 seconds": ROUNDED,
        "about 5 minutes": ROUNDED,
        "about 100 seconds": ROUNDED,
        "about 19 minutes": ROUNDED,
        "about 40 seconds": ROUNDED,
        "about 95 %": ROUNDED,
    },
    "README.zh-CN.md": {
        "170 MB": ARCHIVE,
        "大约需要 20 秒": ROUNDED,
        "大约需要 5 分钟": ROUNDED,
        "大约需要 100 秒": ROUNDED,
        "大约需要 19 分钟": ROUNDED,
        "大约需要 40 秒": ROUNDED,
        "约 95%": ROUNDED,
    },
    "docs/first-steps.md": {"170 MB": ARCHIVE},
    "docs/zh/first-steps.md": {"170 MB": ARCHIVE},
    "docs/results.md": {
        "otherwise about 19 minutes": ROUNDED,
        "| 93 % within": AIM,
        "| 90 % within": AIM,
        "| 94 % with TTA within 1.2 times": AIM,
        "about 91.7 % in 1.24 times": ROUNDED,
        "about 90.0 % in": ROUNDED,
        "about 94.0 % in 1.98 times": ROUNDED,
        "94 % with TTA needs": "the aim of published records",
    },
    "docs/lab-notebook.md": {
        "89.4 %": "results/cpu/scores.json, of a removed method",
        "89.0 %": "results/cpu/scores.json",
    },
    "cifar_lit/recipes/fast94.yaml": {"aims at 94 %": AIM, "94.01 %": RECORD},
    "cifar_lit/recipes/fast95.yaml": {"aims at 95 %": AIM},
    "cifar_lit/recipes/fast96.yaml": {"aims at 96 %": AIM},
    "cifar_lit/recipes/fast100.yaml": {"aims at 75 %": AIM, "75.19 %": RECORD, "3.50 s": RECORD},
    "cifar_lit/recipes/laptop100.yaml": {"aims at 70 %": AIM},
    "cifar_lit/recipes/resnet18.yaml": {"aims at 95 %": AIM},
}


def typed_text(page: Path) -> str:
    """Return the text of a page, or the comments of a recipe, without generated figures and code."""
    text = page.read_text()
    if page.suffix != ".yaml":
        return NOT_TYPED.sub("", text)
    comments = [line.partition("# ")[2] for line in text.splitlines() if "# " in line]
    return "\n".join(line for line in comments if "# File: " not in text or not line.startswith(HEADER_FIELDS))


def test_figures_match_their_files() -> None:
    texts = table.updated_pages(ROOT)
    assert {*PAGES, *RECIPES} <= set(texts)
    stale = [str(page.relative_to(ROOT)) for page, text in texts.items() if text != page.read_text()]
    assert stale == [], "run python scripts/benchmarks/table.py --write"


@pytest.mark.parametrize("key", page_tables.TABLES)
def test_files_have_the_figures_of_each_table(key: str) -> None:
    text = table.table_text(page_tables.TABLES[key], RESULTS, ROOT)
    assert key == "gpu" or "](results/" in text  # the GPU recipes have no file, so no source


def test_a_page_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- results: nonesuch -->\n<!-- /results -->\n")
    with pytest.raises(UsageError, match="nonesuch"):
        table.updated_page(page, RESULTS)


def test_pages_show_figures_without_intervals() -> None:
    assert table.short("91.67 ± 0.14 % (n = 20; 91.61 … 91.74)") == "91.67 ± 0.14 % (n = 20)"
    assert table.short("1,138 s (1,013 … 1,263, n = 2)") == "1,138 s (n = 2)"
    assert table.short("23 of 23") == "23 of 23"


def test_the_index_of_results_lists_every_file() -> None:
    index = (RESULTS / "README.md").read_text()
    files = [path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.*") if path.name != "README.md"]
    assert [file for file in sorted(files) if f"`{file}`" not in index] == []


@pytest.mark.parametrize("page", [*PAGES, *RECIPES], ids=lambda page: page.name)
def test_no_figure_is_typed_by_hand(page: Path) -> None:
    text = typed_text(page)
    for words, reason in EXEMPT.get(str(page.relative_to(ROOT)), {}).items():
        assert words in text and reason, words
        text = text.replace(words, "")
    assert [line for line in text.splitlines() if NUMBER.search(line)] == []
