"""`cifar-lit bench`: each benchmark prints a table and writes its results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from cifar_lit.bench import report
from cifar_lit.bench.commands import bench
from cifar_lit.bench.devices import rows_of
from cifar_lit.bench.process import child_environment, without_places
from cifar_lit.bench.report import spread, write_figures
from cifar_lit.errors import Failure, UsageError
from cifar_lit.hardware import Machine


def run_bench(argv: list[str]) -> dict[str, Any]:
    """Run a benchmark, check the fields that results tables need, and return its figures."""
    bench([*argv, "--json", "made/figures.json"])
    figures: dict[str, Any] = json.loads(Path("made/figures.json").read_text())
    assert figures["bench"] == argv[0]
    assert figures["environment"].keys() == {"date", "cpu", "bf16", "threads", "gpu", "versions"}
    assert figures["headline"].keys() == figures["unit"].keys()
    for value in figures["headline"].values():
        assert value["n"] >= 1 and value["low"] <= value["median"] <= value["high"]
    assert "root" not in figures["settings"]
    return figures


def test_a_cpu_without_a_product_number_is_recorded_with_family_and_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(report, "Path", lambda path: info)
    assert report.exact_cpu("AMD EPYC") == "AMD EPYC"  # a system without /proc
    core = "cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\nstepping\t: 1\n"
    info.write_text(f"processor\t: 0\n{core}\nprocessor\t: 1\n{core}")
    assert report.exact_cpu("AMD EPYC") == "AMD EPYC (family 26, model 2)"
    monkeypatch.setattr(report, "detect_machine", lambda: Machine("AMD EPYC", 2, True))
    assert report.environment()["cpu"] == "AMD EPYC (family 26, model 2)"
    assert report.exact_cpu("Intel(R) Xeon(R) Processor @ 2.80GHz").endswith("@ 2.80GHz (family 26, model 2)")
    assert report.exact_cpu("AMD EPYC 9755 128-Core Processor") == "AMD EPYC 9755 128-Core Processor"


@pytest.mark.slow
def test_one_device_is_measured_in_a_separate_process(capsys: pytest.CaptureFixture[str]) -> None:
    figures = run_bench(["devices", "--devices", "1", "--recipe", "small.yaml", "--accelerator", "cpu"])
    printed = capsys.readouterr()
    assert set(figures["headline"]) == {"1 device", "1 device, speed", "1 device, test accuracy"}
    assert (figures["settings"]["recipe"], figures["accelerator"]) == ("small", "cpu")
    assert printed.out.startswith("devices · small · shapes · global batch 32") and "1 device in 32-true" in printed.out
    assert "1 device, run 1 of 1: " in printed.err
    assert "epoch 1/" not in printed.out  # the training's output is hidden


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_a_gpu_is_compared_with_the_cpu() -> None:
    figures = run_bench(["devices", "--recipe", "quickstart", "--epochs", "1"])
    assert figures["environment"]["gpu"] and figures["accelerator"] == "gpu"
    assert any(label.startswith("gpu 0, ") and label.endswith("speed-up") for label in figures["headline"])


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("devises", "Did you mean devices"),
        ("devices --runs some", "invalid int value"),
        ("devices --runs 0", "--runs must be at least 1"),
        ("devices --devices 1,1", "give different numbers of devices"),
        ("devices --accelerator cpu", "leave --accelerator out"),
        ("devices --devices 1 --logs here", "leave --logs out"),
        ("recipe quickstart --folds 5", "--folds are different sets of trainings"),
    ],
)
def test_an_invalid_benchmark_is_refused(line: str, answer: str) -> None:
    with pytest.raises(UsageError, match=answer):
        bench(line.split())


# ---- results


def test_a_spread_has_median_and_quartiles_or_the_range_of_fewer_than_four_values() -> None:
    assert spread([4.0, 1.0, 2.0, 3.0, 5.0]) == {"n": 5, "median": 3.0, "low": 2.0, "high": 4.0}
    assert spread([4.0, 1.0, 7.0]) == {"n": 3, "median": 4.0, "low": 1.0, "high": 7.0}


def test_a_failed_write_leaves_earlier_figures_unchanged(here: Path) -> None:
    file = here / "figures.json"
    write_figures(file, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_figures(file, {"a": float("nan")})
    assert json.loads(file.read_text()) == {"a": 1}
    with pytest.raises(Failure, match="Choose another place"):
        write_figures(file / "below" / "a.json", {"a": 1})


def test_recorded_flags_contain_no_paths() -> None:
    argv = ["--data-dir", "/a", "--epochs", "2", "--data.root=/b", "--data.cache_dir", "/c", "--lr=1", "--data-dir"]
    assert without_places(argv) == ["--epochs", "2", "--lr=1"]


def test_speed_ups_compare_runs_of_the_same_seed_with_the_first_row() -> None:
    shared: dict[str, Any] = {"images_per_second": 1.0, "test": {"accuracy": 0.5}}
    times = {"1 device": (8.0, 16.0), "2 devices": (4.0, 8.0)}
    runs = {row: [{**shared, "train_seconds": seconds} for seconds in each] for row, each in times.items()}
    values = {label: value for label, value, _ in rows_of(runs)}
    assert values["2 devices"] == {"n": 2, "median": 6.0, "low": 4.0, "high": 8.0}
    assert values["2 devices, speed-up"] == {"n": 2, "median": 2.0, "low": 2.0, "high": 2.0}
    assert "1 device, speed-up" not in values


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_a_benchmark_and_its_processes(number: int) -> None:
    line = "devices --devices 1,2 --recipe small.yaml --epochs 100000"
    command = [sys.executable, "-m", "cifar_lit", "bench", *line.split(), "--json", "f.json"]
    process = subprocess.Popen(
        command, stdout=-1, stderr=-1, text=True, env=child_environment(), start_new_session=True
    )
    assert process.stderr and process.stderr.readline() == "2 trainings, one after the other\n"
    end = time.monotonic() + 60
    while len(live_processes(process.pid)) < 2:  # until the first training has started
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.1)
    time.sleep(3)
    if number == signal.SIGINT:  # Ctrl-C reaches the whole group
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert err.count("\n") == 1 and err.startswith("cifar-lit: stopped")
    assert not out.count("┃") and not Path("f.json").exists()  # no training has finished
    time.sleep(0.5)
    assert live_processes(process.pid) == []


def live_processes(session: int) -> list[str]:
    """Return /proc/PID/stat of the processes of a session that have not ended."""
    lines = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            lines.append(stat.read_text())
    fields = {line: line.rpartition(") ")[2].split() for line in lines}  # proc(5), from the third field
    return [line for line in lines if fields[line][3] == str(session) and fields[line][0] != "Z"]
