"""`cifar-lit bench recipe`: means over seeds, interrupted benchmarks, and separate conditions."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from cifar_lit.bench import recipe
from cifar_lit.bench.commands import bench
from cifar_lit.bench.recipe import process_age, run_once
from cifar_lit.errors import Failure, UsageError
from cifar_lit.training.orderly_stop import Interrupted

RUN: dict[str, Any] = {  # a result of `run_once`
    "seed": 0, "dataset": "shapes", "accelerator": "cpu", "precision": "32-true", "parameters": 10, "accuracy": 0.5,
    "loss": 1.0, "views": None, "seconds": 10.0, "test_seconds": 2.5, "images_per_second": 100.0, "cold_seconds": None,
    "memory_mb": 100, "device_memory_mb": None,
}  # fmt: skip


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fake the runs and record their seeds; the first run of seed 2 is interrupted."""
    seeds: list[int] = []

    def run(name: str, flags: Any, seed: int, *rest: Any) -> dict[str, Any]:
        seeds.append(seed)
        if seed == 2 and seeds.count(2) == 1:
            raise Interrupted(signal.SIGTERM)
        return {**RUN, "seed": seed}

    monkeypatch.setattr(recipe, "run_once", run)
    return seeds


def runs_in(file: str) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads(Path(file).read_text())["recipes"]["small"]["runs"]
    return runs


def test_runs_with_other_threads_or_flags_have_other_conditions() -> None:
    file = Path("small.yaml")
    first = recipe.conditions_of(file, [])
    assert recipe.conditions_of(file, []) == first
    other_flags = recipe.conditions_of(file, ["--lr", "0.5"])
    torch.set_num_threads(torch.get_num_threads() + 1)
    more_threads = recipe.conditions_of(file, [])
    assert {name for name in first if more_threads[name] != first[name]} == {"machine"}
    assert {name for name in first if other_flags[name] != first[name]} == {"flags"}


def test_each_seed_is_a_run_with_the_same_result_as_a_run_alone(capsys: pytest.CaptureFixture[str]) -> None:
    bench(["recipe", "small.yaml", "--runs", "2", "--json", "out/f.json"])
    runs, out = runs_in("out/f.json"), capsys.readouterr().out
    assert [(run["seed"], run["first"]) for run in runs] == [(0, True), (1, False)]
    assert [run["cold_seconds"] is None for run in runs] == [process_age() is None, True]
    assert all(run["test_seconds"] > 0 for run in runs) and "training and test" in out
    assert "small seed 1 (2 of 2)" in out and "share one process" in out and "train loss" not in out
    assert sorted(path.name for path in Path().rglob("*") if path.is_file()) == ["f.json", "small.yaml"]
    alone = run_once("small.yaml", [], 1, None, False)
    assert alone["loss"] == runs[1]["loss"] != runs[0]["loss"]
    with pytest.raises(Failure, match="ended without a test"):
        run_once("small.yaml", ["--trainer.fast_dev_run", "true"], 0, None, False)


def test_the_time_with_the_test_stands_beside_the_training_time_if_it_was_measured() -> None:
    run = {**RUN, "first": False}
    texts = recipe.texts_of([run])
    assert (texts["training time"], texts["training and test"]) == ("10 s (n = 1)", "12.5 s (n = 1)")
    del run["test_seconds"]  # a file of an earlier version
    assert recipe.texts_of([run])["training and test"] == "–"


def test_an_interrupted_benchmark_resumes_with_the_missing_seeds_and_accepts_no_other_conditions(
    seeds: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["recipe", "small.yaml", "--runs", "4", "--json", "f.json"]
    with pytest.raises(Interrupted) as stopped:
        bench(argv)
    assert "│ small  │ 50.00 ± 0.00 % (n = 2)" in capsys.readouterr().out
    assert str(stopped.value.resume).endswith("bench recipe small.yaml --runs 4 --json f.json")
    bench(argv)
    assert seeds == [0, 1, 2, 2, 3]
    assert "2 runs are in f.json, 2 to go" in capsys.readouterr().out
    assert [(run["seed"], run["first"]) for run in runs_in("f.json")] == [(0, True), (1, False), (2, True), (3, False)]
    recipe_file = Path("small.yaml")
    recipe_file.write_text(f"# a header with these figures\n{recipe_file.read_text()}")
    bench([*argv, "--runs", "5"])
    assert seeds[5:] == [4]
    before = Path("f.json").read_bytes()
    for line, reason in (("small.yaml --epochs 2", "other flags"), ("lenet", "has runs of small, which is not")):
        with pytest.raises(UsageError, match=reason):
            bench(["recipe", *line.split(), "--json", "f.json"])
    assert Path("f.json").read_bytes() == before
    Path("f.json").write_text('{"bench": "step"}')
    with pytest.raises(UsageError, match="has no results of `bench recipe`"):
        bench(argv)
    assert Path("f.json").read_text() == '{"bench": "step"}'


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("quickstrat", "Did you mean quickstart"),
        ("quickstart --rusn 3", "Did you mean --runs"),
        ("quickstart --runs 0", "--runs must be at least 1"),
        ("quickstart --seed 1", "--seed0 and --runs"),
        ("quickstart small.yaml ./small.yaml", "same name"),
        ("quickstart --devices 2", "one device"),
    ],
)
def test_an_invalid_benchmark_is_refused_before_any_run(line: str, answer: str) -> None:
    with pytest.raises(UsageError, match=answer):
        bench(["recipe", *line.split()])
    assert [path.name for path in Path().iterdir()] == ["small.yaml"]
