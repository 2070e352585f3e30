from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cifar_lit.bench.commands import bench
from cifar_lit.bench.report import headline
from cifar_lit.bench.summary import summary
from cifar_lit.bench.table import END, START, json_files, markdown, results_text
from cifar_lit.errors import Failure, UsageError

ROOT = Path(__file__).parent.parent.parent
WHERE = {"date": "2026-01-02", "cpu": "a CPU", "threads": 2, "gpu": None, "versions": {"torch": "2"}}


def run(seed: int, accuracy: float) -> dict[str, Any]:
    return {
        "seed": seed, "dataset": "cifar10", "accelerator": "cpu", "precision": "32-true", "parameters": 10,
        "accuracy": accuracy, "loss": 1.0, "views": None, "seconds": 12.5, "images_per_second": 100.0,
        "cold_seconds": None if seed else 20.0, "memory_mb": 800, "device_memory_mb": None, "first": not seed, "curve": None,
    }  # fmt: skip


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with results/: seeds of a recipe, a measurement, a single run's metrics, and a README with markers."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "results" / "cpu"
    folder.mkdir(parents=True)
    entry = {**summary([run(0, 0.90), run(1, 0.92)]), "settings": {}, "runs": []}
    flags = ["--data.dataset=folder", "--trainer.max_epochs", "3", "--trainer.devices=1"]
    figures = {"bench": "recipe", "environment": WHERE, "settings": {"flags": flags}, "recipes": {"laptop": entry}}
    (folder / "a.json").write_text(json.dumps(figures))
    ratio = {"n": 4, "median": 2.5, "low": 2.25, "high": 2.75}
    rows = headline(("ours / plain", ratio, "×"), ("ours", 12345.6, "images/s"))
    (folder / "b.json").write_text(json.dumps({"bench": "input", "environment": WHERE, "settings": {"batch_size": 64}, **rows}))
    metrics = {"recipe": "tudui", "dataset": "folder", "devices": 1, "accelerator": "cpu", "train_seconds": 134.567}
    test = {"accuracy": 0.5368, "tta": {"views": "mirror", "accuracy": 0.55, "loss": 1.0}}
    (folder / "c.json").write_text(json.dumps({**metrics, "test": test}))
    (tmp_path / "README.md").write_text(f"before\n{START}\nstale\n{END}\nafter\n")
    return folder


def test_rows_are_what_the_files_say(results: Path) -> None:
    text = results_text(json_files(["results"]), Path.cwd())
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    assert rows[0] == ["recipe", "images", "machine", "n", "test accuracy", "with views", "train s", "cold s", "peak MB", "file"]
    laptop = "`laptop` with `--trainer.max_epochs 3`"
    link = "[a](results/cpu/a.json)"
    assert rows[2] == [laptop, "cifar10", "a CPU, 2 threads", "2", "91.00 % ± 1.41", "–", "12.50", "20.0", "800", link]
    assert rows[3][:7] == ["`tudui`", "folder", "1 × cpu", "1", "53.68 %", "55.00 % (mirror)", "134.57"]
    assert rows[6][:4] == ["`bench input` (batch size 64)", "a CPU, 2 threads", "ours / plain", "2.5 × (2.25 … 2.75)"]
    assert rows[7][2:4] == ["ours", "12,346 images/s"]


def test_the_table_is_written_between_the_markers_and_checked_there(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = Path("README.md")
    with pytest.raises(Failure, match=r"out of date: `cifar-lit bench table --write README\.md`"):
        bench(["table", "--check", "README.md"])
    bench(["table", "--write", "README.md"])
    written = readme.read_text()
    assert written.startswith(f"before\n{START}\n\n| recipe |")
    assert written.endswith(f"|\n\n{END}\nafter\n")
    assert "stale" not in written
    bench(["table", "--check", "README.md"])
    bench(["table", "--write", "README.md"])
    assert readme.read_text() == written
    assert capsys.readouterr().out.splitlines() == ["README.md: renewed", "README.md: is up to date"]
    readme.write_text(written.replace("91.00 %", "91.10 %"))
    with pytest.raises(Failure):
        bench(["table", "--check", "README.md"])


def test_without_a_file_the_table_is_printed(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench(["table", "results/cpu/c.json"])
    assert capsys.readouterr().out.startswith("| recipe | images |")


@pytest.mark.parametrize("text", ["nothing", START, f"{END}{START}", f"{START}{START}{END}"])
def test_a_file_without_the_markers_is_not_touched(results: Path, text: str) -> None:
    Path("README.md").write_text(text)
    with pytest.raises(UsageError, match="once each"):
        bench(["table", "--write", "README.md"])
    assert Path("README.md").read_text() == text


def test_what_is_no_result_is_named(results: Path) -> None:
    with pytest.raises(UsageError, match="there is no nowhere"):
        bench(["table", "nowhere"])
    Path("results/cpu/d.json").write_text('{"something": 1}')
    with pytest.raises(UsageError, match=r"d\.json holds neither"):
        bench(["table"])
    Path("results/cpu/d.json").write_text('{"something')
    with pytest.raises(UsageError, match=r"d\.json cannot be read"):
        bench(["table"])


def test_recipes_can_stand_without_the_other_measurements(results: Path) -> None:
    with pytest.raises(Failure, match=r"`cifar-lit bench table --recipes --write README\.md` renews them"):
        bench(["table", "--recipes", "--check", "README.md"])
    bench(["table", "--recipes", "--write", "README.md"])
    written = Path("README.md").read_text()
    assert "| recipe |" in written
    assert "bench input" not in written
    bench(["table", "--recipes", "--check", "README.md"])


def test_a_column_without_an_entry_is_left_out() -> None:
    assert markdown(("a", "b", "c"), [["1", "–", "x|y"]]) == "| a | c |\n| --- | --- |\n| 1 | x\\|y |"


def test_the_readme_says_what_the_results_say() -> None:
    bench(["table", str(ROOT / "results"), "--recipes", "--check", str(ROOT / "README.md")])
    bench(["table", str(ROOT / "results"), "--check", str(ROOT / "results" / "README.md")])
