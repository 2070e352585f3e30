"""Report, classify, serve and export work with a fine-tuned timm net at its image size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest
from contract.command_line import rows_of, run_command
from PIL import Image, ImageDraw

import cifar_lit

pytest.importorskip("timm", reason="pip install 'cifar-lit[finetune]'")
SIDE = 256


def photo(label: int, seed: int) -> Image.Image:
    """Return noise with light bars (label 0) or dark discs (label 1)."""
    random = np.random.default_rng([label, seed])
    image = Image.fromarray(random.integers(60, 190, (12, 16, 3), dtype=np.uint8)).resize((320, 240))
    draw = ImageDraw.Draw(image)
    for x, y in random.integers(0, 200, (6, 2)).tolist():
        if label:
            draw.ellipse((x, y, x + 50, y + 50), (20, 20, 40))
        else:
            draw.rectangle((x, y, x + 12, y + 120), (250, 240, 220))
    return image


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Train the last layer with the recipe finetune in the working folder."""
    folder = tmp_path_factory.mktemp("fine-tuned")
    for label, name in enumerate(("bars", "discs")):
        for part, count in (("train", 8), ("test", 4)):
            (folder / f"photos/{part}/{name}").mkdir(parents=True)
            for number in range(count):
                photo(label, 100 * (part == "test") + number).save(folder / f"photos/{part}/{name}/{number}.jpg")
    with chdir(folder):
        flags = (
            "--finetune.unfreeze",
            "false",
            "--data.val_size",
            "4",
            "--accelerator",
            "cpu",
            "--precision",
            "32-true",
        )
        answer = run_command("train", "--recipe", "finetune", "--data-dir", "photos", *flags)
        assert answer.code == 0, answer.err
        assert "test accuracy 1.0000" in answer.out
        yield folder / "lightning_logs/finetune-1"


def test_classify_works_at_its_image_size(run: Path) -> None:
    answer = run_command("classify", run, "photos/test/discs", "--csv", "rows.csv")
    assert answer.code == 0, answer.err
    assert [row["label"] for row in rows_of(Path("rows.csv"))] == ["discs"] * 4
    classifier = cifar_lit.load(run)
    assert classifier.prepare("photos/test/bars/0.jpg").shape == (1, 3, SIDE, SIDE)
