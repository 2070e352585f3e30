"""README and docs/ name files, headings, commands, flags and messages that exist."""

import ast
import re
from pathlib import Path

import pytest
from contract.command_line import ROOT, run_command
from doc_pages import SCRIPTS, TRAINING, blocks, command_lines

from cifar_lit.cli import flags
from cifar_lit.cli.main import OWN

PAGES = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "lightning_logs/README.md",
    *sorted((ROOT / "results").glob("*.md")),
    *sorted(page for page in (ROOT / "docs").glob("**/*.md") if "_build" not in page.parts),
]
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
NEEDS_A_FILE = {"--resume", "--config", "--ckpt_path", "--help"}
OF_TORCH = {"Expected all tensors to be on the same device", "no kernel image is available"}


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub and the site give to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text())):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def commands() -> dict[str, list[str]]:
    """Return the arguments of every command of the pages by its line, except those that another test runs."""
    found = {}
    for page in PAGES:
        for block in blocks(page.read_text()):
            for words in command_lines(block.text) if block.language == "bash" and block.kind != "run" else []:
                script = next((place for place, word in enumerate(words) if word in SCRIPTS), None)
                if script is not None:
                    found[" ".join(words)] = [SCRIPTS[words[script]], *words[script + 1 :]]
                elif words[0] == "cifar-lit":
                    found[" ".join(words)] = words[1:]
    return {line: words for line, words in found.items() if not NEEDS_A_FILE & {*words}}


@pytest.mark.parametrize("words", commands().values(), ids=commands())
def test_a_command_of_a_page_can_be_typed(words: list[str]) -> None:
    """A training passes all checks before data and devices are accessed; of another command, the flags exist."""
    if words[0] in TRAINING:
        answer = run_command(*words, "--print_config")
        assert answer.code == 0, answer.err
    if words[0] not in OWN:
        assert words[0] in flags.TRAINING
        return
    text = run_command(words[0], "--help").out
    used = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert [flag for flag in used if f"{flag} " not in f"{text} "] == []


def test_every_short_flag_is_explained() -> None:
    page = (ROOT / "docs/recipes-and-flags.md").read_text()
    assert [flag for flag in (*flags.SHORT, *flags.OWN) if f"`--{flag}" not in page] == []


def strings_of_the_package() -> str:
    """Return all string constants of the package; an f-string is split at its values."""
    sources = [path.read_text() for path in (ROOT / "cifar_lit").rglob("*.py")]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    return "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def test_quoted_messages_are_those_of_the_package() -> None:
    """Messages stand in the first column of the tables of docs/troubleshooting.md."""
    known = strings_of_the_package()
    page = (ROOT / "docs/troubleshooting.md").read_text().partition("## No network")[0]
    rows = re.findall(r"^\| (`.+?) \|", page, re.MULTILINE)
    quoted = {message for row in rows for message in re.findall(r"`([^`]+)`", row)} - OF_TORCH
    parts = [text.strip() for message in quoted for text in re.split(r"…|\d+|\bnan\b", message)]
    assert [text for text in parts if text not in known] == []
