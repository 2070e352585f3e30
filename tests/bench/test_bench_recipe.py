"""`cifar-lit bench recipe`: seeds become means, a stopped measurement goes on, and nothing is mixed."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cifar_lit.bench import recipe
from cifar_lit.bench.commands import bench
from cifar_lit.bench.recipe import images_held, process_age, run_once, summary
from cifar_lit.data.sources import SourceSettings, load_images
from cifar_lit.errors import Failure, UsageError
from cifar_lit.runs.compare import mean_interval, t_quantile
from cifar_lit.training.callbacks import Interrupted

SMALL = """trainer: {accelerator: cpu, max_epochs: 1, precision: 32-true}
model: {net: lenet, lr: 0.05, momentum: 0.9}
data: {dataset: shapes, image_size: 16, num_classes: 4, count: 100, val_size: 20, batch_size: 32}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty working folder with the recipe small.yaml; signal handlers are put back."""
    (tmp_path / "small.yaml").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def made_up(seed: int, accuracy: float = 0.5, seconds: float = 10.0, first: bool = False) -> dict[str, Any]:
    """A run as `run_once` returns it."""
    return {
        "seed": seed, "dataset": "shapes", "accelerator": "cpu", "precision": "32-true", "parameters": 10,
        "accuracy": accuracy, "loss": 1.0, "views": {"views": "mirror", "accuracy": accuracy + 0.01, "loss": 0.9},
        "seconds": seconds, "images_per_second": 100.0, "cold_seconds": 9.0 if first else None, "memory_mb": 100 + seed,
        "device_memory_mb": None, "first": first,
    }  # fmt: skip


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seeds of the runs, which are made up; the run of seed 2 is interrupted the first time."""
    seeds: list[int] = []
    interrupted: list[int] = []

    def run(name: str, flags: Any, seed: int, *rest: Any) -> dict[str, Any]:
        if seed == 2 and not interrupted:
            interrupted.append(seed)
            raise Interrupted(signal.SIGTERM)
        seeds.append(seed)
        return made_up(seed)

    monkeypatch.setattr(recipe, "run_once", run)
    return seeds


def test_seeds_become_means_with_an_interval_and_files(capsys: pytest.CaptureFixture[str]) -> None:
    bench(["recipe", "small.yaml", "--runs", "3", "--json", "out/f.json"])
    figures = json.loads(Path("out/f.json").read_text())
    entry = figures["recipes"]["small"]
    accuracies = [run["accuracy"] for run in entry["runs"]]
    assert [run["seed"] for run in entry["runs"]] == [0, 1, 2]
    assert entry["accuracy"]["mean"] == pytest.approx(sum(accuracies) / 3)
    assert entry["accuracy"]["low"] <= entry["accuracy"]["mean"] <= entry["accuracy"]["high"]
    assert [run["first"] for run in entry["runs"]] == [True, False, False]
    assert entry["seconds"]["n"] == 2  # of the warm runs
    assert [run["cold_seconds"] is None for run in entry["runs"]] == [process_age() is None, True, True]
    said = capsys.readouterr().out
    assert "small seed 2 (3 of 3)" in said and "share one process" in said
    assert "train loss" not in said
    assert sorted(path.name for path in Path().rglob("*") if path.is_file()) == ["f.json", "small.yaml"]
    alone = run_once("small.yaml", [], 2, None, False)  # a seed gives in company what it gives alone
    assert alone["loss"] == entry["runs"][2]["loss"] != entry["runs"][1]["loss"]


def test_a_measurement_that_was_stopped_goes_on_with_the_seeds_that_are_missing(
    made: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["recipe", "small.yaml", "--runs", "4", "--json", "f.json"]
    with pytest.raises(Interrupted) as stopped:
        bench(argv)
    assert str(stopped.value.resume).endswith("bench recipe small.yaml --runs 4 --json f.json")
    bench(argv)
    assert made == [0, 1, 2, 3]
    assert "2 runs are done already (in f.json); 2 to go" in capsys.readouterr().out
    runs = json.loads(Path("f.json").read_text())["recipes"]["small"]["runs"]
    assert [run["seed"] for run in runs] == [0, 1, 2, 3]
    assert [run["first"] for run in runs] == [True, False, True, False]
    bench([*argv, "--runs", "5"])
    assert made == [0, 1, 2, 3, 4]
    assert sorted(path.name for path in Path().iterdir()) == ["f.json", "small.yaml"]


def test_a_run_that_was_cut_short_is_no_result() -> None:
    with pytest.raises(Failure, match="ended without a test"):
        run_once("small.yaml", ["--trainer.fast_dev_run", "true"], 0, None, False)


@pytest.mark.parametrize(
    ("argv", "differs"),
    [
        (["small.yaml", "--epochs", "2"], "other flags"),
        (["quickstart"], "holds runs of small, which is not measured"),
    ],
)
def test_runs_of_other_settings_are_not_mixed(argv: list[str], differs: str, made: list[int]) -> None:
    bench(["recipe", "small.yaml", "--runs", "1", "--json", "f.json"])
    before = Path("f.json").read_bytes()
    with pytest.raises(UsageError, match=differs):
        bench(["recipe", *argv, "--json", "f.json"])
    assert Path("f.json").read_bytes() == before


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "which recipe"),
        (["quickstrat"], "Did you mean quickstart"),
        (["quickstart", "--rusn", "3"], "Did you mean --runs"),
        (["quickstart", "--runs", "0"], "--runs must be at least 1"),
        (["quickstart", "--runs", "many"], "invalid int"),
        (["quickstart", "--seed", "1"], "--seed0 and --runs"),
        (["quickstart", "small.yaml", "./small.yaml"], "called alike"),
        (["quickstart", "--devices", "2"], "one device"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(argv: list[str], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        bench(["recipe", *argv])
    assert [path.name for path in Path().iterdir()] == ["small.yaml"]


def test_a_file_with_something_else_is_left_alone() -> None:
    Path("f.json").write_text('{"bench": "step"}')
    with pytest.raises(UsageError, match="holds no figures of `bench recipe`"):
        bench(["recipe", "small.yaml", "--json", "f.json"])
    assert Path("f.json").read_text() == '{"bench": "step"}'


def test_images_are_loaded_once_while_they_are_held_and_afresh_afterwards() -> None:
    settings = SourceSettings(image_size=16, count=20)
    with images_held():
        first = load_images("shapes", settings, True)
        assert load_images("shapes", settings, True) is first
        assert load_images("shapes", settings, False) is not first
    assert load_images("shapes", settings, True) is not first


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.3027), (9, 2.2622), (199, 1.9720)],
)
def test_students_t_is_that_of_the_tables(freedom: int, quantile: float) -> None:
    assert t_quantile(freedom) == pytest.approx(quantile, abs=6e-5)


def test_an_interval_is_mean_plus_and_minus_t_standard_errors() -> None:
    interval = mean_interval([0.90, 0.92, 0.94])
    assert (interval["n"], interval["mean"], interval["std"]) == (3, pytest.approx(0.92), pytest.approx(0.02))
    assert interval["high"] - interval["mean"] == pytest.approx(4.30265 * 0.02 / 3**0.5, rel=1e-5)
    assert interval["mean"] - interval["low"] == pytest.approx(interval["high"] - interval["mean"])
    assert mean_interval([0.9]) == {"n": 1, "mean": 0.9, "std": None, "low": None, "high": None}


def test_accuracy_counts_all_runs_and_time_the_warm_ones() -> None:
    runs = [made_up(0, 0.8, 50.0, first=True), made_up(1, 0.9, 10.0), made_up(2, 0.7, 20.0)]
    entry = summary(runs)
    assert (entry["accuracy"]["n"], entry["accuracy"]["mean"]) == (3, pytest.approx(0.8))
    assert (entry["views"]["views"], entry["views"]["mean"]) == ("mirror", pytest.approx(0.81))
    assert (entry["seconds"]["n"], entry["seconds"]["median"]) == (2, 15.0)
    assert (entry["cold_seconds"]["n"], entry["cold_seconds"]["median"]) == (1, 9.0)
    assert entry["memory_mb"] == 102
    alone = summary(runs[:1])
    assert (alone["warm"], alone["seconds"]["median"]) == (False, 50.0)
