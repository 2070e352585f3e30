"""Every figure of the README, of docs/ and of the recipes' headers is that of its file, or stands here with its reason."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from contract.command_line import ROOT

sys.path.append(str(ROOT / "scripts" / "benchmarks"))

import table

PAGES = [ROOT / "README.md", ROOT / "results" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RECIPES = sorted((ROOT / "cifar_lit" / "recipes").glob("*.yaml"))
UNITS = r"%|×(?! ?\d)|ms\b|s\b|min\b|minutes?\b|seconds?\b|hours?\b|images/s|MB\b|points?\b|times\b|million\b"
NUMBER = re.compile(rf"(?<![\w.])\d[\d.,]*(?: … [\d.,]+)? ?(?:{UNITS})|\b(?:tenth|third|fifth|quarter)s?\b")
FIELDS = ("Score", "Time", "Hardware", "Date")
HELD = re.compile(
    r"```.*?```|<!-- results.*?<!-- /results -->|<!--.*?-->", re.DOTALL
)  # tables are renewed, code is no figure

TRUST = "a promise that tests/security holds"
AIM = "an aim, not a result"
EXEMPT: dict[str, dict[str, str]] = {  # page: what is typed there, and why
    "README.md": {"170 MB": "of the archive as published", "95 %": "a level"},
    "docs/how-fast.md": {
        "9 minutes": "the limit in scripts/gpu_bench.sh",
        "without the 30 % of the images": "what was tried",
        "cores are 93 %": AIM,
        "two fifths of it": AIM,
        "within six fifths": AIM,
        "tests, 90 %": AIM,
        "and 94 % with views": AIM,
        "94 % with views takes": "the level of the published records",
    },
    "docs/many-devices.md": {"60 s;": "the default of --rank-timeout"},
    "docs/fine-tuning.md": {"200 MB": "a thousand times 256 × 256 × 3 bytes", "a quarter of the pixels": "arithmetic"},
    "docs/recipes-and-flags.md": {"a quarter at 28": "what the setting beside it says"},
    "docs/run-folder.md": {"95 % interval": "a level"},
    "docs/unequal-classes.md": {
        "94.1 %, with a 95 % interval of 89.2 … 96.9 %": "an example, as the program prints it",
        "95 % interval": "a level",
        "2 points": "the limit in cli/console.py",
    },
    "docs/security.md": {"1 s of a CPU and 100 MB": TRUST},
    "docs/use-a-trained-net.md": {
        "95 % intervals": "a level",
        "95 % of the validation images": "a level",
        "10 MB": "a default of serve",
        "25 million": "a default of serve",
        "0.5 s": "a default of serve",
        "10 s": "a default of serve",
    },
    "cifar_lit/recipes/fast94.yaml": {"aims at 94 %": AIM, "94.01 %": "of Jordan, 2025"},
    "cifar_lit/recipes/fast95.yaml": {"aims at 95 %": AIM, "is 95 %": AIM},
    "cifar_lit/recipes/fast96.yaml": {"aims at 96 %": AIM, "is 96 %": AIM},
    "cifar_lit/recipes/fast100.yaml": {"aims at 75 %": AIM, "75.19 %": "of the write-up", "3.50 s": "of the write-up"},
    "cifar_lit/recipes/laptop100.yaml": {"aims at 70 %": AIM},
    "cifar_lit/recipes/resnet18.yaml": {"aims at 95 %": AIM},
}


def unheld(page: Path) -> str:
    """What is typed by hand in a page, or in the comments of a recipe with a file."""
    text = page.read_text()
    if page.suffix != ".yaml":
        return HELD.sub("", table.FIGURE.sub("", text))
    comments = [line.partition("# ")[2] for line in text.splitlines() if "# " in line]
    return "\n".join(line for line in comments if "# File: " not in text or not line.startswith(FIELDS))


def test_figures_are_those_of_their_files(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = table.renewed_pages(ROOT)
    assert {*PAGES, *RECIPES} <= set(pages)
    stale = [str(page.relative_to(ROOT)) for page, text in pages.items() if text != page.read_text()]
    assert stale == [], "python scripts/benchmarks/table.py --write"


@pytest.mark.parametrize("page", [*PAGES, *RECIPES], ids=lambda page: page.name)
def test_no_figure_is_typed_by_hand(page: Path) -> None:
    text = unheld(page)
    for fragment, reason in EXEMPT.get(str(page.relative_to(ROOT)), {}).items():
        assert fragment in text and reason, fragment
        text = text.replace(fragment, "")
    assert [line for line in text.splitlines() if NUMBER.search(line)] == []
