"""What measurements make of their numbers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jsonargparse import Namespace
from torch.autograd import DeviceType

from cifar_lit.bench.clock import Lap
from cifar_lit.bench.comparison import comparison
from cifar_lit.bench.devices import cell, columns, figures_of, table_rows
from cifar_lit.bench.interleave import Round
from cifar_lit.bench.process import public, train
from cifar_lit.bench.profile import covered, operators
from cifar_lit.bench.report import footer, headline, shown_spread, spread, write_figures
from cifar_lit.errors import Failure, UsageError
from cifar_lit.hardware import Machine


def test_a_spread_is_median_and_quartiles_within_the_values() -> None:
    assert spread([4.0, 1.0, 2.0, 3.0, 5.0]) == {"n": 5, "median": 3.0, "low": 2.0, "high": 4.0}
    assert spread([1.0, 3.0]) == {"n": 2, "median": 2.0, "low": 1.5, "high": 2.5}
    assert spread([7.0]) == {"n": 1, "median": 7.0, "low": 7.0, "high": 7.0}
    assert shown_spread(spread([1000.0, 3000.0])) == "2,000 (1,500 … 2,500)"
    assert shown_spread(spread([7.0])) == "7"


def test_a_headline_is_flat() -> None:
    found = headline(("a", spread([1.0, 3.0]), "s"), ("b", 2.0, "×"), ("c", spread([4.0]), "s"))
    assert found == {"headline": {"a": [1.5, 2.0, 2.5], "b": 2.0, "c": 4.0}, "unit": {"a": "s", "b": "×", "c": "s"}}


def test_figures_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    write_figures(file, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_figures(file, {"a": float("nan")})
    assert json.loads(file.read_text()) == {"a": 1}
    with pytest.raises(Failure, match="Choose another place"):
        write_figures(file / "below" / "a.json", {"a": 1})
    assert list(tmp_path.iterdir()) == [file]


def test_a_footer_names_machine_and_versions() -> None:
    place = {"date": "2026-01-02", "cpu": "C", "threads": 3, "gpu": None, "versions": {"torch": "9"}}
    assert footer({"environment": place}) == "C, 3 threads · 2026-01-02 · torch 9"
    assert footer({"environment": {**place, "gpu": "G"}}) == "C, 3 threads · G · 2026-01-02 · torch 9"


def test_ratios_are_taken_within_each_round() -> None:
    rounds = [Round(10, 100, 1.0, 2.0), Round(10, 100, 2.0, 2.0), Round(20, 200, 4.0, 16.0)]
    found = comparison("step", Namespace(net="x", json=None, root="/data"), rounds, "bare loop")
    assert found["speed_ratio"] == {"n": 3, "median": 2.0, "low": 1.5, "high": 3.0}
    assert found["ours"]["images_per_second"]["median"] == 50.0
    assert found["plain"]["images_per_second"]["median"] == 50.0
    assert found["ours"]["ms_per_step"]["median"] == 200.0
    assert found["difference_ms_per_step"] == 0.0
    assert found["settings"] == {"net": "x"}
    assert found["unit"]["ours / bare loop"] == "×"


def test_every_gpu_is_a_column_and_compared_with_the_cpu_at_the_same_place() -> None:
    machine = Machine("c", 4, True, gpus=(("A", 1), ("B", 1)))
    assert [(one.name, one.devices) for one in columns(machine)] == [("cpu", 1), ("gpu 0, A", [0]), ("gpu 1, B", [1])]
    assert [one.name for one in columns(Machine("c", 4, True))] == ["cpu"]
    cells = [
        {"batch_size": size, "width": 1.0, "device": device, "precision": "p", **cell([Lap(5, 5 * size, seconds)])}
        for size, times in ((4, (2.0, 1.0)), (64, (8.0, 0.5)))
        for device, seconds in zip(("cpu", "gpu 0, A"), times, strict=True)
    ]
    found = figures_of(Namespace(), cells)
    assert [one["speed_up"] for one in found["cells"]] == [None, 2.0, None, 16.0]
    assert found["cells"][0]["epoch_seconds"]["median"] == 50_000 / (20 / 2.0)
    assert found["headline"]["gpu 0, A, batch 64, width 1"] == 78.125
    assert [row[-1] for row in table_rows(found["cells"])] == ["", "2.00", "", "16.00"]
    alone = figures_of(Namespace(), [cells[1]])
    assert alone["cells"][0]["speed_up"] is None


def test_time_under_several_kernels_at_once_counts_once() -> None:
    assert covered([]) == 0
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.75)]) == 4.0


def event(name: str, device: Any, own: float, host: float = 0.0, annotation: bool = False) -> Any:
    return SimpleNamespace(
        key=name,
        count=2,
        device_type=device,
        self_device_time_total=own,
        self_cpu_time_total=host,
        is_user_annotation=annotation,
    )


def test_a_profile_lists_kernels_on_a_gpu_and_operators_on_a_cpu() -> None:
    seen = [
        event("short", DeviceType.CUDA, 1e3),
        event("long", DeviceType.CUDA, 2e6),
        event("named range", DeviceType.CUDA, 9e6, annotation=True),
        event("aten::mm", DeviceType.CPU, 0.0, host=5e5),
    ]
    assert [(one.name, one.calls, one.seconds) for one in operators(seen, on_cpu=False)] == [("long", 2, 2.0), ("short", 2, 1e-3)]
    assert [(one.name, one.seconds) for one in operators(seen, on_cpu=True)] == [("aten::mm", 0.5)]


def test_flags_are_told_without_the_places_of_files() -> None:
    words = ["--data-dir", "/a", "--epochs", "2", "--data.root=/b", "--data.cache_dir", "/c", "--lr=1", "--data-dir"]
    assert public(words) == ["--epochs", "2", "--lr=1"]


def test_a_training_in_its_own_process_that_fails_says_why() -> None:
    with pytest.raises(UsageError, match="Did you mean tudui") as caught:
        train(["--recipe", "tudoi"])
    assert not str(caught.value).startswith("cifar-lit")


def test_a_training_in_its_own_process_leaves_its_metrics_and_its_lines() -> None:
    small = ["--dataset", "shapes", "--data.count", "40", "--data.val_size", "10", "--epochs", "1", "--accelerator", "cpu"]
    done = train(["--recipe", "tudui", *small, "--seed", "3"])
    assert (done.metrics["recipe"], done.metrics["seed"], done.metrics["epochs"]) == ("tudui", 3, 1)
    card = next(seconds for seconds, text in done.lines if text.startswith("data "))
    last = next(seconds for seconds, text in done.lines if text.startswith("test accuracy"))
    assert 0 < card < card + done.metrics["train_seconds"] < last < done.seconds
