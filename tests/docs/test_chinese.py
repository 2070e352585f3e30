"""The Chinese pages have the commands, code, output and messages of their English counterparts."""

import ast
import re

import pytest
from contract.command_line import ROOT
from doc_pages import BLOCK, command_lines

MIRROR = "https://dataset.bj.bcebos.com"
COUNTERPARTS = {
    "README.zh-CN.md": "README.md",
    "docs/zh/index.md": "docs/index.md",
    "docs/zh/first-steps.md": "docs/first-steps.md",
    "docs/zh/own-photos.md": "docs/own-photos.md",
    "docs/zh/devices.md": "docs/many-devices.md",
    "docs/zh/colab-and-kaggle.md": "docs/colab-and-kaggle.md",
    "docs/zh/errors.md": "docs/troubleshooting.md",
    "docs/zh/from-a-hand-written-loop.md": "docs/from-a-hand-written-loop.md",
}
# Only about downloads in China. No command is left out of a Chinese page.
ONLY_CHINESE = {
    f"python scripts/train.py --recipe cpu91 --data.url {MIRROR}/cifar/cifar-10-python.tar.gz",
    f"python scripts/train.py --recipe laptop100 --data.url {MIRROR}/cifar/cifar-100-python.tar.gz",
    f"python scripts/train.py --recipe fashion_cnn --data.url {MIRROR}/fashion_mnist/",
    "python scripts/train.py --recipe cpu91 --data-dir datasets",
}


def blocks(page: str) -> list[str]:
    """Return the commands, statements and other fenced text of a page, without comments and remarks in brackets."""
    texts = []
    for block in BLOCK.finditer((ROOT / page).read_text()):
        if block["language"] == "bash":
            texts += [" ".join(words) for words in command_lines(block["text"])]
        elif block["language"] == "python":
            texts.append(ast.dump(ast.parse(block["text"])))
        else:
            texts.append(re.sub(r" *[(（].*?[)）]", "", block["text"]))
    return [text for text in texts if text not in ONLY_CHINESE]


def test_every_chinese_page_has_a_counterpart() -> None:
    pages = {"README.zh-CN.md", *(f"docs/zh/{page.name}" for page in (ROOT / "docs/zh").glob("*.md"))}
    assert pages == set(COUNTERPARTS)


@pytest.mark.parametrize("page", COUNTERPARTS)
def test_commands_and_code_are_the_same(page: str) -> None:
    english = blocks(COUNTERPARTS[page])
    # A Chinese page may also have what an English page without a translation says.
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    elsewhere = {block for path in pages for block in blocks(str(path))} - set(english)
    assert [block for block in blocks(page) if block not in elsewhere] == english


@pytest.mark.parametrize("page", COUNTERPARTS)
def test_pages_link_to_each_other(page: str) -> None:
    up = "../" * (page.count("/") - 1)
    english = COUNTERPARTS[page].rpartition("/")[2]
    assert f"[English]({up}{english}) · 中文\n" in (ROOT / page).read_text()
    index = (ROOT / ("docs/index.md" if up else "README.md")).read_text()
    assert f"]({page.removeprefix('docs/')})" in index


def quoted_messages(page: str) -> set[str]:
    """Return the code in the first column of the tables of messages, above the section about downloads."""
    text = re.split("^## (?:No network|下载数据)$", (ROOT / page).read_text(), flags=re.MULTILINE)[0]
    return {
        message for row in re.findall(r"^\| (`.+?) \|", text, re.MULTILINE) for message in re.findall(r"`([^`]+)`", row)
    }


def test_quoted_messages_are_the_same() -> None:
    assert quoted_messages("docs/zh/errors.md") == quoted_messages("docs/troubleshooting.md")
