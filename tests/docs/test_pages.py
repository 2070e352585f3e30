"""README and docs/ name files, headings, commands, flags and messages that exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from contract.command_line import ROOT, run_command
from doc_pages import BLOCK, command_lines

from cifar_lit.cli import flags
from cifar_lit.cli.main import OWN

PAGES = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "lightning_logs/README.md",
    *sorted((ROOT / "results").glob("*.md")),
    *sorted(page for page in (ROOT / "docs").glob("**/*.md") if "_build" not in page.parts),
]
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


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


def lines_of_pages() -> Iterator[tuple[str, ...]]:
    """Yield every command of a page, except those that another test runs."""
    for page in PAGES:
        for block in BLOCK.finditer(page.read_text()):
            if block["language"] == "bash" and not (block["note"] or "").startswith("run"):
                yield from map(tuple, command_lines(block["text"]))


def training_lines() -> list[tuple[str, ...]]:
    """Return the arguments of every new training in a page that needs no file of the reader."""
    trainings: dict[tuple[str, ...], None] = {}
    for words in lines_of_pages():
        start = next((place for place, word in enumerate(words) if word.endswith("train.py")), None)
        if words[0] == "cifar-lit" and words[1] in ("fit", "train"):
            start = 1
        if start is not None and not {"--resume", "--config", "--help"} & set(words):
            trainings[words[start + 1 :]] = None
    return list(trainings)


def own_lines() -> list[tuple[str, ...]]:
    """Return every line of a page with one of the project's own commands, without the program."""
    lines = dict.fromkeys(words[1:] for words in lines_of_pages() if words[0] == "cifar-lit")
    return [words for words in lines if words[0] in OWN]


@pytest.mark.parametrize("words", training_lines(), ids=" ".join)
def test_a_training_of_a_page_can_be_typed(words: tuple[str, ...]) -> None:
    """Everything that is checked before data and devices are accessed."""
    assert run_command(*words, "--print_config").code == 0


@pytest.mark.parametrize("words", own_lines(), ids=" ".join)
def test_flags_of_a_command_exist(words: tuple[str, ...]) -> None:
    command = words[:2] if words[0] == "bench" else words[:1]
    text = run_command(*command, "--help").out
    used = {word.partition("=")[0] for word in words if word.startswith("--")}
    if words[0] == "bench":  # its trainings take every other flag
        used -= {
            flag for flag in used if flag[2:] in flags.SHORT or flag.startswith(("--model.", "--data.", "--trainer."))
        }
    assert [flag for flag in used if f"{flag} " not in f"{text} "] == []


def test_every_short_flag_is_explained() -> None:
    page = (ROOT / "docs/recipes-and-flags.md").read_text()
    assert [flag for flag in (*flags.SHORT, *flags.OWN) if f"`--{flag}" not in page] == []


def strings_of_the_package() -> str:
    """Return all string constants of the package; an f-string is split at its values."""
    sources = [path.read_text() for path in (ROOT / "cifar_lit").rglob("*.py")]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    return "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def quoted_messages() -> list[str]:
    """Return the messages in the first column of the tables of docs/troubleshooting.md, except torch's."""
    page = (ROOT / "docs/troubleshooting.md").read_text().partition("## No network")[0]
    rows = re.findall(r"^\| (`.+?) \|", page, re.MULTILINE)
    quoted = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    return [message for message in quoted if message != "Expected all tensors to be on the same device"]


def test_quoted_messages_are_those_of_the_package() -> None:
    known = strings_of_the_package()
    parts = {message: re.split(r"…|\d+|\bnan\b", message) for message in quoted_messages()}
    assert len(parts) > 20
    assert [message for message, texts in parts.items() if any(text.strip() not in known for text in texts)] == []
