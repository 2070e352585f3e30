"""`cifar-lit bench`: each measurement prints a table and writes what it found."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from small_subjects import SMALL

from cifar_lit.bench import cold, scaling
from cifar_lit.bench.commands import BENCHES, bench
from cifar_lit.bench.process import Finished
from cifar_lit.errors import UsageError

TURNS = ["--steps", "2", "--rounds", "3"]
LINES = {
    "step": ["step", *SMALL, *TURNS],
    "step of a recipe": ["step", "--recipe", "tudui", *SMALL, *TURNS],
    "hand": ["hand", *SMALL, "--runs", "2", "--epochs", "1"],
    "tutorial": ["tutorial", *SMALL, *TURNS],
    "tutorial by epochs": ["tutorial", *SMALL, "--epochs", "2"],
    "input": ["input", *SMALL, "--batches", "2", "--rounds", "2"],
    "devices": ["devices", *SMALL[:4], "--batch-sizes", "4,8", "--widths", "1", "--warmup", "1", "--steps", "2", "--rounds", "2"],
    "whole epochs on devices": ["devices", *SMALL[:4], "--batch-sizes", "30", "--widths", "0.5", "--full", "--rounds", "1"],
    "profile": ["profile", *SMALL, "--warmup", "1", "--steps", "2", "--top", "3"],
}


@pytest.mark.parametrize("what", LINES)
def test_a_measurement_prints_its_table_and_writes_its_figures(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = LINES[what]
    file = tmp_path / "made" / "figures.json"
    bench([*words, "--json", str(file)])
    found = json.loads(file.read_text())
    assert found["bench"] == words[0]
    check_promised(found)
    shown = capsys.readouterr().out
    assert shown.startswith(f"bench {words[0]} · ")
    assert f"torch {found['environment']['versions']['torch']}" in shown
    assert "epoch 1/" not in shown  # the training that is measured is not shown


def check_promised(found: dict[str, Any]) -> None:
    """What the table of results relies on."""
    assert {"settings", "environment", "headline", "unit"} <= found.keys()
    assert {"date", "cpu", "threads", "gpu", "versions"} == found["environment"].keys()
    assert found["headline"].keys() == found["unit"].keys()
    assert found["headline"]
    for value in found["headline"].values():
        numbers = value if isinstance(value, list) else [value]
        assert len(numbers) in (1, 3)
        assert numbers == sorted(numbers)
    assert "root" not in found["settings"]


def test_both_loops_make_as_many_steps_of_as_many_images(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    bench(["step", "--recipe", "folder", *SMALL, *TURNS, "--json", str(file)])
    found = json.loads(file.read_text())
    assert found["rounds"] == 3
    settings = found["settings"]
    assert (settings["net"], settings["lr"], settings["batch_size"], settings["dataset"]) == ("shapenet", 0.01, 16, "shapes")
    for side in ("ours", "plain"):
        assert found[side]["images_per_second"]["n"] == 3
    assert found["headline"]["ours / bare loop"][1] == found["speed_ratio"]["median"]


def test_the_list_of_measurements_names_a_module_each(capsys: pytest.CaptureFixture[str]) -> None:
    bench(["--help"])
    shown = capsys.readouterr().out
    for name in BENCHES:
        assert f"  {name} " in shown
        module = import_module(f"cifar_lit.bench.{name}")
        assert len(module.WHAT) > 40
        assert hasattr(module, "main") or (hasattr(module, "run") and hasattr(module, "add_arguments"))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["stpe"], "Did you mean step"),
        (["step", "--rounds", "1"], "--rounds 2"),
        (["step", "--stepz", "3"], "Did you mean --steps"),
        (["step", "--recipe", "tudoi"], "Did you mean tudui"),
        (["step", *SMALL, "--precision", "64-true"], "set --precision"),
        (["step", *SMALL, "--accelerator", "gpuu"], "Did you mean gpu"),
        (["tutorial", "--epochs", "-1"], "--epochs 1"),
        (["input", *SMALL, "--batches", "50"], "lower --batches"),
        (["devices", "--batch-sizes", "4;8"], "numbers with commas"),
        (["devices", "--warmup", "0"], "--warmup 1"),
        (["profile", "--steps", "0"], "--steps 1"),
        (["scaling", "--devices", "1,1"], "different numbers"),
        (["scaling", "--devices", "two"], "different numbers"),
        (["scaling", "--logs", "here"], "leave --logs out"),
        (["scaling", "--runs", "some"], "invalid int value"),
        (["cold", "--runs", "0"], "--runs 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(words: list[str], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        bench(words)


def test_a_recipe_with_a_setting_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("data: {dataset: shapes, count: 60}\nmodel: {net: lenet, rate: 1}\n")
    with pytest.raises(UsageError, match="rate"):
        bench(["step", "--recipe", str(file), "--count", "60"])


def finished(seconds: float, accuracy: float, images_per_second: float = 100.0) -> Finished:
    """A training that took `seconds`, after 5 s before its first step and with 1 s after its last."""
    named = {
        "recipe": "r",
        "net": "n",
        "dataset": "d",
        "batch_size": 8,
        "epochs": 2,
        "precision": "32-true",
        "accelerator": "cpu",
    }
    metrics = {**named, "train_seconds": seconds, "images_per_second": images_per_second, "test": {"accuracy": accuracy}}
    return Finished(metrics, seconds + 6.0, [(5.0, "data         d · train 8"), (seconds + 5.5, "test accuracy 0.5")])


def test_scaling_compares_runs_of_the_same_seed_with_the_first_number_of_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[list[str]] = []

    def train(words: list[str]) -> Finished:
        lines.append(words)
        devices, seed = (int(words[words.index(flag) + 1]) for flag in ("--devices", "--seed"))
        return finished({1: 8.0, 2: 4.0, 4: 1.0}[devices] * (1 + seed), 0.5 + 0.1 * seed)

    monkeypatch.setattr(scaling, "train", train)
    file = tmp_path / "figures.json"
    bench(["scaling", "--devices", "1,2,4", "--runs", "2", "--json", str(file), "--recipe", "tudui", "--data-dir", "/secret"])
    assert [line[:4] for line in lines] == [["--recipe", "tudui", "--data-dir", "/secret"]] * 6
    found = json.loads(file.read_text())
    check_promised(found)
    assert found["settings"]["flags"] == ["--recipe", "tudui"]
    assert [row["speed_up"]["median"] for row in found["rows"]] == [1.0, 2.0, 8.0]
    assert [row["train_seconds"]["median"] for row in found["rows"]] == [12.0, 6.0, 1.5]
    assert found["headline"]["2 devices"] == [5.0, 6.0, 7.0]
    shown = capsys.readouterr().out
    assert "55.00% ± 7.07" in shown
    assert "share this machine's" in shown


def test_a_cold_run_is_cut_at_its_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold, "train", lambda words: finished(3.0, 0.5))
    monkeypatch.setattr(cold, "import_seconds", lambda: 2.0)
    file = tmp_path / "figures.json"
    bench(["cold", "--runs", "2", "--json", str(file)])
    found = json.loads(file.read_text())
    check_promised(found)
    parts = {name: value["median"] for name, value in found["seconds"].items()}
    assert parts == {"imports alone": 2.0, "to the first step": 5.0, "training": 3.0, "test and files": 1.0, "all": 9.0}
