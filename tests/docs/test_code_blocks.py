"""The marked blocks of the pages run as a reader runs them: files are written, statements and commands succeed."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from contract.command_line import ROOT, environment, rows_of
from doc_pages import DOCS, blocks, follow, sections
from torchvision import datasets

TOGETHER = ("first-steps.md", "from-a-hand-written-loop.md")  # later sections use what earlier ones make
SLOW = ("from-a-hand-written-loop.md",)
FOLLOWED = ("file", "run", "python")


def units() -> Iterator[Any]:
    """Yield each text that is followed in a folder of its own: a page, or a section of a page."""
    for page in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]:
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


@pytest.mark.slow
def test_a_feature_is_a_file_and_a_line() -> None:
    page = (DOCS / "extending.md").read_text()
    (block,) = [block for block in blocks(page) if block.kind == "feature"]
    shutil.copytree(ROOT / "cifar_lit", "cifar_lit", ignore=shutil.ignore_patterns("__pycache__"))
    Path("cifar_lit/features/loss_cap.py").write_text(block.text)
    names = Path("cifar_lit/features/__init__.py")
    names.write_text(names.read_text().replace("_CLASSES = {", "_CLASSES = {" + block.value, 1))
    (settings,) = re.findall("<!-- settings: (.*) -->", page)
    line = ["fit", "--recipe", "quickstart", "--loss_cap.most", "1.5", *settings.split()]
    variables = environment(Path.cwd(), PYTHONPATH=str(Path.cwd()))
    trained = subprocess.run([sys.executable, "-m", "cifar_lit", *line], env=variables, capture_output=True, text=True)
    assert trained.returncode == 0, trained.stderr
    rows = rows_of(Path("lightning_logs/quickstart-1/metrics.csv"))
    assert max(float(row["train/loss"]) for row in rows if row["train/loss"]) <= 1.5
