"""README and docs/ name files, commands and flags that there are."""

import re
from pathlib import Path

import pytest
from contract.command_line import ROOT, run_command
from doc_pages import BLOCK, command_lines

from cifar_lit.cli import flags
from cifar_lit.cli.main import OWN

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "lightning_logs/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if "://" in link:
            continue
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in [heading.lower().replace(" ", "-") for heading in headings], link


def test_readme_is_short_and_leads_to_every_page() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) < 150
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"](docs/{page.name})" not in readme] == []


def training_lines() -> dict[tuple[str, ...], str]:
    """Every line in a page that starts a training anew, with the page; none of files that a reader has."""
    lines: dict[tuple[str, ...], str] = {}
    for page in PAGES:
        for block in BLOCK.finditer(page.read_text()):
            if block["language"] == "bash" and not (block["note"] or "").startswith("run"):  # those are run
                for words in command_lines(block["text"]):
                    if words[0] == "cifar-lit":
                        assert words[1] in (*OWN, *flags.TRAINING), words
                    if "train.py" in " ".join(words) and not {"--resume", "--config"} & set(words):
                        lines[tuple(words)] = page.name
    return lines


@pytest.mark.parametrize("words", training_lines(), ids=" ".join)
def test_a_line_of_a_page_can_be_typed(words: tuple[str, ...]) -> None:
    """What is checked before data and devices are looked at."""
    start = next(place for place, word in enumerate(words) if word.endswith("train.py")) + 1
    assert run_command(*words[start:], "--print_config").code == 0


def test_every_short_flag_is_explained() -> None:
    page = (ROOT / "docs/recipes-and-flags.md").read_text()
    assert [flag for flag in (*flags.SHORT, *flags.OWN) if f"`--{flag}" not in page] == []
