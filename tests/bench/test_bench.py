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

import pytest

from cifar_lit.bench import report
from cifar_lit.bench.commands import bench
from cifar_lit.bench.process import child_environment, without_places
from cifar_lit.bench.report import spread, write_figures
from cifar_lit.errors import Failure, UsageError
from cifar_lit.hardware import Machine


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


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("recipes", "Did you mean recipe"),
        ("recipe quickstart --runs some", "invalid int value"),
        ("recipe quickstart --runs 0", "--runs must be at least 1"),
        ("recipe quickstart --folds 5", "takes no --folds"),
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_a_benchmark_and_its_processes(number: int) -> None:
    line = "bench recipe small.yaml --epochs 100000 --json f.json"
    command = [sys.executable, "-m", "cifar_lit", *line.split()]
    process = subprocess.Popen(
        command, stdout=-1, stderr=-1, text=True, env=child_environment(), start_new_session=True
    )
    assert process.stderr and any(text.startswith("training 1 of 3") for text in process.stderr)
    if number == signal.SIGINT:  # Ctrl-C reaches the whole group
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    lines = [line for line in err.splitlines() if not line.startswith(("round ", "training "))]
    assert lines[0].startswith("cifar-lit: stopped") and len(lines) <= 2  # with the command to resume
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
