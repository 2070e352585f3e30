"""`cifar-lit bench recipe` and `train --seeds --json`: one driver, and a file for the tables of results."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import table

from cifar_lit.bench.commands import bench
from cifar_lit.cli.fit import TrainingCLI
from cifar_lit.cli.flags import parse
from cifar_lit.cli.seeds import train_seeds
from cifar_lit.errors import UsageError
from cifar_lit.runs.run_folder import read_metrics
from cifar_lit.training.orderly_stop import Interrupted

RUN: dict[str, Any] = {  # an entry of a file
    "seed": 0, "dataset": "shapes", "accelerator": "cpu", "precision": "32-true", "parameters": 10, "accuracy": 0.5,
    "loss": 1.0, "views": None, "seconds": 10.0, "test_seconds": 2.5, "images_per_second": 100.0, "memory_mb": 1000,
    "device_memory_mb": None, "first": False,
}  # fmt: skip
LOGS = Path("lightning_logs")


def entry_in(file: str, recipe: str = "small") -> dict[str, Any]:
    return dict(json.loads(Path(file).read_text())["recipes"][recipe])


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Record the seeds of the trainings; the first training with seed 2 is interrupted before it begins."""
    seeds: list[str | None] = []
    start = TrainingCLI.__init__

    def train(self: TrainingCLI, command: Any) -> None:
        seeds.append(command.value("seed_everything"))
        if seeds[-1] == "2" and seeds.count("2") == 1:
            raise Interrupted(signal.SIGTERM)
        start(self, command)

    monkeypatch.setattr(TrainingCLI, "__init__", train)
    return seeds


def test_the_file_has_scores_times_and_memory_of_each_seed_as_a_training_alone_has_them() -> None:
    bench(["recipe", "small.yaml", "--runs", "2", "--seed0", "4", "--lr", "0.01", "--json", "out/f.json"])
    figures = json.loads(Path("out/f.json").read_text())
    assert figures["bench"] == "recipe" and figures["environment"]["cpu"]
    assert figures["settings"] == {"flags": ["--model.lr=0.01", "--trainer.devices=1"]}
    runs, accuracy = (entry_in("out/f.json")[name] for name in ("runs", "accuracy"))
    assert [(run["seed"], run["first"]) for run in runs] == [(4, True), (5, False)]
    for number, run in enumerate(runs, 1):
        metrics = read_metrics(LOGS / f"small-seeds-1/small-{number}")
        assert run["seconds"] == metrics["train_seconds"] and run["test_seconds"] == metrics["test_seconds"]
        assert run["images_per_second"] == metrics["images_per_second"] and run["accuracy"] == run["balanced_accuracy"]
        assert 100 < run["memory_mb"] < 100_000 and run["device_memory_mb"] is None
    assert accuracy["n"] == 2 and accuracy["mean"] == sum(run["accuracy"] for run in runs) / 2
    texts = table.figure_texts(figures)
    assert texts["small: test accuracy"].endswith("% (n = 2)") and texts["small: peak memory"].endswith(" MB")
    TrainingCLI(parse("train", ["--recipe", "small.yaml", "--lr", "0.01", "--seed", "5", "--logs", "alone"]))
    alone = read_metrics(Path("alone/small-1"))
    assert alone["test"]["loss"] == runs[1]["loss"] != runs[0]["loss"]


def test_a_stopped_measurement_names_its_own_command(seeds: list[str | None]) -> None:
    argv = ["recipe", "small.yaml", "--runs", "2", "--seed0", "2", "--json", "f.json"]
    with pytest.raises(Interrupted) as stopped:
        bench(argv)
    assert str(stopped.value.resume).endswith(f"bench {' '.join(argv)}")


def test_the_command_that_continues_stopped_seeds_names_their_file(seeds: list[str | None]) -> None:
    with pytest.raises(Interrupted) as stopped:
        train_seeds(parse("train", ["--json", "f.json", "--recipe", "small.yaml", "--seeds", "2-3"]))
    assert str(stopped.value.resume).endswith("train --recipe small.yaml --seeds=2-3 --json=f.json")
    assert not Path("f.json").exists() and not [*LOGS.iterdir()]


def test_times_leave_out_first_trainings_and_a_time_or_memory_that_was_not_measured_is_a_dash() -> None:
    first = {**RUN, "seconds": 90.0, "first": True, "memory_mb": None}
    texts = table.texts_of([first, RUN])
    assert (texts["training time"], texts["training and test"]) == ("10 s (n = 1)", "12.5 s (n = 1)")
    assert (texts["peak memory"], texts["start to result"]) == ("1,000 MB", "–")
    assert table.texts_of([{**RUN, "device_memory_mb": 5}])["peak memory"] == "1,000 MB + 5 MB on the device"
    earlier = {name: value for name, value in first.items() if name != "test_seconds"} | {"cold_seconds": 19.1}
    texts = table.texts_of([earlier])
    assert (texts["training and test"], texts["start to result"]) == ("–", "19.1 s (n = 1)")
    assert (texts["training time"], texts["peak memory"]) == ("90 s (n = 1)", "–")


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("--runs 3", "needs a recipe"),
        ("quickstrat", "Did you mean quickstart"),
        ("quickstart --runs 0", "--runs must be at least 1"),
        ("quickstart --seed0 -1", "--seed0 at least 0"),
        ("quickstart --seed 1", "sets seed_everything: leave it out"),
        ("quickstart small.yaml ./small.yaml", "same name"),
        ("quickstart --devices 2 --json f.json", "--json measures on one device"),
    ],
)
def test_an_invalid_benchmark_is_refused_before_any_run(line: str, answer: str) -> None:
    with pytest.raises(UsageError, match=answer):
        bench(["recipe", *line.split()])
    assert [path.name for path in Path().iterdir()] == ["small.yaml"]
