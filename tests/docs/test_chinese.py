"""The Chinese pages have commands of the English ones, and both link to each other."""

import re

import pytest
from contract.command_line import ROOT
from doc_pages import DOCS, blocks, command_lines

MIRROR = "https://dataset.bj.bcebos.com"
# Only about downloads in China.
ONLY_CHINESE = {
    f"python scripts/train.py --recipe cpu91 --data.url {MIRROR}/cifar/cifar-10-python.tar.gz",
    f"python scripts/train.py --recipe laptop100 --data.url {MIRROR}/cifar/cifar-100-python.tar.gz",
    f"python scripts/train.py --recipe fashion_cnn --data.url {MIRROR}/fashion_mnist/",
    "python scripts/train.py --recipe cpu91 --data-dir datasets",
}
PAGES = [ROOT / "README.zh-CN.md", *sorted((DOCS / "zh").glob("*.md"))]


def commands(text: str) -> set[str]:
    return {
        " ".join(words) for block in blocks(text) if block.language == "bash" for words in command_lines(block.text)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_chinese_page_has_commands_of_the_english_pages(page) -> None:
    english = {*ONLY_CHINESE}
    for path in [ROOT / "README.md", *DOCS.glob("*.md")]:
        english |= commands(path.read_text())
    text = page.read_text()
    assert commands(text) - english == set()
    assert re.search(r"^\[English\]\(\S+\.md\) · 中文$", text, re.MULTILINE)
