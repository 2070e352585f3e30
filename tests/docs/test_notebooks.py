"""The notebooks in examples/ run from top to bottom, on few images, and are committed without outputs."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from contract.command_line import ROOT, metrics_of

nbformat = pytest.importorskip("nbformat", reason="pip install -e '.[dev]'")
nbclient = pytest.importorskip("nbclient", reason="pip install -e '.[dev]'")

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def run(name: str, settings: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Execute a notebook in the working folder, with some of its parameters changed; a failing cell raises.

    Returns the text that its cells printed.
    """
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # for `!cifar-lit`
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("CIFAR_LIT_CACHE", str(Path("cache").absolute()))
    book = nbformat.read(ROOT / "examples" / name, as_version=4)
    (place,) = [place for place, cell in enumerate(book.cells) if "parameters" in cell.metadata.get("tags", [])]
    names = {line.partition(" = ")[0] for line in settings.splitlines()}
    assert names <= {line.partition(" = ")[0] for line in book.cells[place].source.splitlines()}
    book.cells.insert(place + 1, nbformat.v4.new_code_cell(settings))
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(Path.cwd())}}).execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    return "".join(output.text for output in outputs if output.output_type == "stream")


@pytest.mark.slow
def test_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = run("first_steps.ipynb", "COUNT = 400\nEPOCHS = 1", monkeypatch)
    assert "\ntest accuracy 0." in printed
    assert (Path("lightning_logs/notebook/version_0/metrics.csv")).is_file()


@pytest.mark.slow
def test_own_photos(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("timm", reason="pip install 'cifar-lit[finetune]'")
    pytest.importorskip("onnxruntime", reason="pip install 'cifar-lit[export]'")
    printed = run("own_photos.ipynb", 'DRAWN = 15\nFLAGS = "--epochs 1 --data.image_size 64"', monkeypatch)
    assert metrics_of(Path("lightning_logs/finetune-1"))["test"]["images"] == 9  # a fifth of the drawn photos
    assert len(Path("predictions.csv").read_text().splitlines()) == 1 + 45
    assert re.search(r"\.jpg (forest|sand|snow)\n\Z", printed)  # the prediction of the ONNX file


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_committed_without_outputs_and_its_cells_are_short(path: Path) -> None:
    cells: list[dict[str, Any]] = json.loads(path.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
    assert max(len(cell["source"]) for cell in code) <= 20
    assert all(len(line.rstrip("\n")) <= 100 for cell in code for line in cell["source"])
