"""`cifar-lit bench`: each measurement prints a table and writes what it measured."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from cifar_lit.bench.commands import BENCHES, bench
from cifar_lit.bench.devices import columns, speeds_of, with_speed_up
from cifar_lit.bench.process import train, without_places
from cifar_lit.bench.report import figures_of, spread, spread_text, write_figures
from cifar_lit.bench.scaling import rows_of
from cifar_lit.bench.step import Round, compared
from cifar_lit.bench.training import Lap
from cifar_lit.errors import Failure, UsageError
from cifar_lit.hardware import Machine

# images that are drawn at once, a batch that leaves a rest
SMALL = ["--dataset", "shapes", "--data.count", "90", "--batch-size", "16", "--accelerator", "cpu"]
TURNS = ["--steps", "2", "--rounds", "3"]
LINES = {
    "step in its own time": ["step", *SMALL, "--rounds", "3"],
    "step of a recipe": ["step", "--recipe", "folder", *SMALL, *TURNS],
    "tutorial": ["tutorial", *SMALL, *TURNS],
    "tutorial by epochs": ["tutorial", *SMALL, "--epochs", "2"],
    "input": ["input", *SMALL, "--batches", "2", "--rounds", "2"],
    "devices": ["devices", *SMALL[:4], "--batch-sizes", "4,8", "--widths", "1", "--warmup", "1", "--steps", "2", "--rounds", "2"],
    "whole epochs on devices": ["devices", *SMALL[:4], "--batch-sizes", "30", "--widths", "0.5", "--full", "--rounds", "1"],
}


@pytest.mark.parametrize("what", LINES)
def test_a_measurement_prints_its_table_and_writes_its_figures(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = LINES[what]
    monkeypatch.setattr("cifar_lit.bench.step.SECONDS", 1e-6)  # for a round of a step
    file = tmp_path / "made" / "figures.json"
    bench([*argv, "--json", str(file)])
    figures = json.loads(file.read_text())
    assert figures["bench"] == argv[0]
    check_promised(figures)
    said = capsys.readouterr()
    assert said.out.startswith(f"bench {argv[0]} · ")
    where = figures["environment"]
    assert f"{where['cpu']}, {where['threads']} threads · " in said.out and f"torch {where['versions']['torch']}" in said.out
    assert "epoch 1/" not in said.out  # the training that is measured is not shown
    if what.startswith("step"):
        assert figures["rounds"] == figures["ours"]["images_per_second"]["n"] == figures["plain"]["images_per_second"]["n"] == 3
        assert figures["headline"]["ours / bare loop"][1] == figures["speed_ratio"]["median"]
        assert "this takes about " in said.err and f"3 rounds of {figures['settings']['steps']} steps" in said.err
        assert figures["settings"]["steps"] == (2 if what == "step of a recipe" else 1)
    if what == "step of a recipe":
        settings = figures["settings"]
        assert (settings["net"], settings["lr"], settings["batch_size"]) == ("shapenet", 0.01, 16)


def check_promised(figures: dict[str, Any]) -> None:
    """What tables of results rely on."""
    assert {"settings", "environment", "headline", "unit"} <= figures.keys()
    assert {"date", "cpu", "threads", "gpu", "versions"} == figures["environment"].keys()
    assert figures["headline"].keys() == figures["unit"].keys() != set()
    for value in figures["headline"].values():
        numbers = value if isinstance(value, list) else [value]
        assert len(numbers) in (1, 3)
        assert numbers == sorted(numbers)
    assert "root" not in figures["settings"]


def test_the_list_of_measurements_names_each(capsys: pytest.CaptureFixture[str]) -> None:
    bench(["--help"])
    listed = capsys.readouterr().out
    assert list(BENCHES) == ["recipe", "step", "tutorial", "input", "devices", "scaling"]
    for name in BENCHES:
        assert f"  {name} " in listed
        with pytest.raises(SystemExit):
            bench([name, "--help"])
        assert "--json FILE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["stpe"], "Did you mean step"),
        (["step", "--rounds", "1"], "--rounds 2"),
        (["step", "--stepz", "3"], "Did you mean --steps"),
        (["step", "--recipe", "tudoi"], "Did you mean tudui"),
        (["step", *SMALL, "--precision", "64-true"], "set --precision"),
        (["tutorial", "--epochs", "-1"], "--epochs 1"),
        (["input", *SMALL, "--batches", "50"], "lower --batches"),
        (["devices", "--batch-sizes", "4;8"], "numbers with commas"),
        (["devices", "--warmup", "0"], "--warmup 1"),
        (["scaling", "--devices", "1,1"], "different numbers"),
        (["scaling", "--logs", "here"], "leave --logs out"),
        (["scaling", "--runs", "some"], "invalid int value"),
        (["scaling", "--runs", "0"], "--runs 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(argv: list[str], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        bench(argv)


def test_a_recipe_with_a_setting_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("data: {dataset: shapes, count: 60}\nmodel: {net: lenet, rate: 1}\n")
    with pytest.raises(UsageError, match="rate"):
        bench(["step", "--recipe", str(file), "--count", "60"])


# ---- what measurements make of their numbers


def test_a_spread_is_median_and_quartiles_within_the_values() -> None:
    assert spread([4.0, 1.0, 2.0, 3.0, 5.0]) == {"n": 5, "median": 3.0, "low": 2.0, "high": 4.0}
    assert spread([1.0, 3.0]) == {"n": 2, "median": 2.0, "low": 1.5, "high": 2.5}
    assert spread([7.0]) == {"n": 1, "median": 7.0, "low": 7.0, "high": 7.0}
    assert spread_text(spread([1000.0, 3000.0])) == "2,000 (1,500 … 2,500)"
    assert spread_text(spread([7.0])) == "7"
    figures = figures_of("x", {"root": "/a", "n": 1}, ("a", spread([1.0, 3.0]), "s"), ("b", 2.0, "×"), ("c", spread([4.0]), "s"))
    assert figures["headline"] == {"a": [1.5, 2.0, 2.5], "b": 2.0, "c": 4.0}
    assert (figures["unit"], figures["settings"]) == ({"a": "s", "b": "×", "c": "s"}, {"n": 1})


def test_figures_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    write_figures(file, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_figures(file, {"a": float("nan")})
    assert json.loads(file.read_text()) == {"a": 1}
    with pytest.raises(Failure, match="Choose another place"):
        write_figures(file / "below" / "a.json", {"a": 1})
    assert list(tmp_path.iterdir()) == [file]


def test_ratios_are_taken_within_each_round() -> None:
    rounds = [Round(10, 100, 1.0, 2.0), Round(10, 100, 2.0, 2.0), Round(20, 200, 4.0, 16.0)]
    figures = compared("step", Namespace(net="x", json=None, root="/data"), rounds, "bare loop")
    assert figures["speed_ratio"] == {"n": 3, "median": 2.0, "low": 1.5, "high": 3.0}
    assert figures["ours"]["images_per_second"]["median"] == figures["plain"]["images_per_second"]["median"] == 50.0
    assert figures["ours"]["ms_per_step"]["median"] == 200.0
    assert figures["difference_ms_per_step"] == 0.0
    assert figures["settings"] == {"net": "x"}


def test_every_gpu_is_a_column_and_compared_with_the_cpu_at_the_same_place() -> None:
    machine = Machine("c", 4, True, gpus=(("A", 1), ("B", 1)))
    assert [(one.name, one.devices) for one in columns(machine)] == [("cpu", 1), ("gpu 0, A", [0]), ("gpu 1, B", [1])]
    assert [one.name for one in columns(Machine("c", 4, True))] == ["cpu"]
    cells = [
        {"batch_size": size, "width": 1.0, "device": device, "precision": "p", **speeds_of([Lap(5, 5 * size, seconds)])}
        for size, times in ((4, (2.0, 1.0)), (64, (8.0, 0.5)))
        for device, seconds in zip(("cpu", "gpu 0, A"), times, strict=True)
    ]
    assert [one["speed_up"] for one in with_speed_up(cells)] == [None, 2.0, None, 16.0]
    assert [cells[0]["epoch_seconds"]["median"], cells[3]["epoch_seconds"]["median"]] == [50_000 / (20 / 2.0), 78.125]
    assert with_speed_up(cells[1:2])[0]["speed_up"] is None


def test_scaling_compares_runs_of_the_same_seed_with_the_first_number_of_devices() -> None:
    shared: dict[str, Any] = {"images_per_second": 1.0, "test": {"accuracy": 0.5}}
    runs = {devices: [{**shared, "train_seconds": seconds * run} for run in (1, 2)] for devices, seconds in ((1, 8.0), (2, 4.0))}
    rows = rows_of(runs)
    assert [row["speed_up"]["median"] for row in rows] == [1.0, 2.0]
    assert rows[1]["train_seconds"] == {"n": 2, "median": 6.0, "low": 5.0, "high": 7.0}


# ---- trainings in processes of their own


def test_flags_are_told_without_the_places_of_files() -> None:
    argv = ["--data-dir", "/a", "--epochs", "2", "--data.root=/b", "--data.cache_dir", "/c", "--lr=1", "--data-dir"]
    assert without_places(argv) == ["--epochs", "2", "--lr=1"]


def test_scaling_trains_in_processes_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--dataset", "shapes", "--data.count", "40", "--data.val_size", "10", "--epochs", "1", "--accelerator", "cpu"]
    bench(["scaling", "--devices", "1", "--json", str(tmp_path / "f.json"), "--recipe", "tudui", *small])
    figures = json.loads((tmp_path / "f.json").read_text())
    assert (figures["settings"]["recipe"], figures["settings"]["flags"][:2]) == ("tudui", ["--recipe", "tudui"])
    check_promised(figures)
    assert "1 device, run 1 of 1: " in capsys.readouterr().err


def test_a_training_in_its_own_process_that_fails_says_why() -> None:
    with pytest.raises(UsageError, match="Did you mean tudui") as caught:
        train(["--recipe", "tudoi"])
    assert not str(caught.value).startswith("cifar-lit")
