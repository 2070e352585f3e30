"""The Chinese pages have commands and Python code of the English ones, and both link to each other."""

import ast
import re
from pathlib import Path

import pytest
from contract.command_line import ROOT
from doc_pages import DOCS, blocks, command_lines

MIRROR = "https://dataset.bj.bcebos.com"
# Only about downloads in China.
ONLY_CHINESE = {
    f"python scripts/train.py --recipe cpu91 --data.url {MIRROR}/cifar/cifar-10-python.tar.gz",
    f"python scripts/train.py --recipe cpu100 --data.url {MIRROR}/cifar/cifar-100-python.tar.gz",
    f"python scripts/train.py --recipe fashion_cnn --data.url {MIRROR}/fashion_mnist/",
    "python scripts/train.py --recipe cpu91 --data-dir datasets",
}
ENGLISH = [ROOT / "README.md", *DOCS.glob("*.md")]
PAGES = [ROOT / "README.zh-CN.md", *sorted((DOCS / "zh").glob("*.md"))]


def statements(page: Path) -> set[str]:
    """Return the commands and the blocks of Python of a page, without comments."""
    found = set()
    for block in blocks(page.read_text()):
        if block.language == "bash":
            found |= {" ".join(words) for words in command_lines(block.text)}
        elif block.language == "python":
            found.add(ast.unparse(ast.parse(block.text)))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_chinese_page_has_commands_and_code_of_the_english_pages(page: Path) -> None:
    assert statements(page) - ONLY_CHINESE - set.union(*map(statements, ENGLISH)) == set()
    assert re.search(r"^\[English\]\(\S+\.md\) · 中文$", page.read_text(), re.MULTILINE)
