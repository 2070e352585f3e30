"""The marked blocks of the pages run as a reader runs them: files are written, statements and commands succeed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doc_pages import DOCS, blocks, follow, sections
from torchvision import datasets

TOGETHER = ("first-steps.md", "from-a-hand-written-loop.md")  # later sections use what earlier ones make
SLOW = ("from-a-hand-written-loop.md",)
FOLLOWED = ("file", "run", "python")


def units() -> Iterator[Any]:
    """Yield each text that is followed in a folder of its own: a page, or a section of a page."""
    for page in sorted(DOCS.glob("*.md")):
        parts = [("", page.read_text())] if page.name in TOGETHER else list(sections(page))
        for heading, text in parts:
            if any(block.kind in FOLLOWED for block in blocks(text)):
                marks = [pytest.mark.slow] if page.name in SLOW else []
                yield pytest.param(page, text, marks=marks, id=f"{page.stem} {heading}".strip())


def few_images(root: str, train: bool, transform: Any, download: bool) -> datasets.FakeData:
    return datasets.FakeData(60 if train else 20, (3, 32, 32), 10, transform)


@pytest.mark.parametrize(("page", "text"), units())
def test_blocks_run(page: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "CIFAR10", few_images)
    follow(page, text)
