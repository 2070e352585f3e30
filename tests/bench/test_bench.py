"""`cifar-lit bench`: each measurement prints a table and writes what it measured."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from cifar_lit.bench.commands import BENCHES, bench
from cifar_lit.bench.devices import devices_of
from cifar_lit.bench.process import child_environment, train, without_places
from cifar_lit.bench.progress import Progress
from cifar_lit.bench.report import spread, spread_text, write_figures
from cifar_lit.bench.scaling import rows_of
from cifar_lit.errors import Failure, UsageError
from cifar_lit.hardware import Machine

# images that are drawn at once, a batch that leaves a rest
IMAGES = ["--dataset", "shapes", "--data.count", "90"]
SMALL = [*IMAGES, "--batch-size", "16"]
TURNS = ["--steps", "2", "--rounds", "3"]
LINES = {  # with the labels of what is measured
    "step in its own time": (["step", *SMALL, "--rounds", "3"], {"ours", "bare loop", "ours / bare loop"}),
    "step of a recipe": (["step", "--recipe", "folder", *SMALL, *TURNS], {"ours", "bare loop, a step"}),
    "tutorial": (["tutorial", *SMALL, "--epochs", "2"], {"ours", "the tutorial's loop, float32"}),
    "input": (
        ["input", *SMALL, "--batches", "2", "--rounds", "2"],
        {"ours", "ours / the strongest rival", "ours / PIL, 2 workers"},
    ),
    "devices": (["devices", *IMAGES, *TURNS, "--batch-sizes", "4,8", "--widths", "0.5", "--warmup", "1"], set()),
}


def measured(argv: list[str]) -> dict[str, Any]:
    """The figures of a measurement, which hold what tables of results rely on."""
    bench([*argv, "--json", "made/figures.json"])
    figures: dict[str, Any] = json.loads(Path("made/figures.json").read_text())
    assert (figures["bench"], figures["environment"].keys()) == (argv[0], {"date", "cpu", "bf16", "threads", "gpu", "versions"})
    assert figures["headline"].keys() == figures["unit"].keys()
    for value in figures["headline"].values():
        assert value["n"] >= 1 and value["low"] <= value["median"] <= value["high"]
    assert "root" not in figures["settings"]
    return figures


@pytest.mark.parametrize("what", LINES)
def test_a_measurement_prints_its_table_and_writes_its_figures(
    what: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv, labels = LINES[what]
    monkeypatch.setattr("cifar_lit.bench.step.SECONDS", 1e-6)  # for rounds of a step
    figures = measured([*argv, "--accelerator", "cpu"])
    said, settings = capsys.readouterr(), figures["settings"]
    assert said.out.startswith(f"{argv[0]} · ") and f"torch {figures['environment']['versions']['torch']}" in said.out
    assert figures["headline"].keys() >= labels and all(label in said.out for label in figures["headline"])
    assert "epoch 1/" not in said.out  # the training that is measured is not shown
    if argv[0] == "step":
        assert figures["rounds"] == 3 == figures["headline"]["ours"]["n"]
        assert re.search(rf"this takes about \d+ s: 3 rounds of {settings['steps']} step", said.err)
    if what == "step of a recipe":
        assert (settings["net"], settings["lr"], settings["batch_size"], settings["steps"]) == ("shapenet", 0.01, 16, 2)
    if what == "tutorial":
        assert figures["rounds"] == 2
    if what == "input":
        assert f"the strongest rival is {figures['strongest']}" in said.out
    if what == "devices":
        assert [label[:9] for label in figures["headline"]] == ["cpu, batc"] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("what", LINES)
def test_a_gpu_is_measured_too(what: str) -> None:
    figures = measured([*LINES[what][0], "--accelerator", "auto"])
    assert figures["environment"]["gpu"]
    assert figures.get("device", "cuda") == "cuda"
    assert what != "devices" or any("against the CPU" in label for label in figures["headline"])


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
    ("line", "answer"),
    [
        ("stpe", "Did you mean step"),
        ("step --rounds 1", "--rounds 2"),
        ("step --stepz 3", "Did you mean --steps"),
        ("step --recipe tudoi", "Did you mean tudui"),
        ("step --recipe odd.yaml --count 60", "rate"),
        ("step --dataset shapes --count 90 --precision 64-true --accelerator cpu", "set --precision"),
        ("tutorial --epochs -1", "--epochs 1"),
        ("tutorial --recipe laptop", "does not know optimizer 'muon'"),
        ("step --recipe weighted.yaml --count 90 --accelerator cpu", "without model.class_weights"),
        ("step --recipe broken.yaml", "not valid YAML at line 2"),
        ("input --dataset shapes --count 90 --batches 50", "lower --batches"),
        ("input --dataset shapes --batch-size 0", "--batch-size 1"),
        ("recipe quickstart --folds 5", "takes no --folds"),
        ("devices --batch-sizes 4;8", "numbers with commas"),
        ("devices --warmup 0", "--warmup 1"),
        ("scaling --devices 1,1", "different numbers"),
        ("scaling --logs here", "leave --logs out"),
        ("scaling --runs some", "invalid int value"),
    ],
)
def test_what_cannot_be_measured_is_refused(line: str, answer: str) -> None:
    Path("odd.yaml").write_text("data: {dataset: shapes, count: 60}\nmodel: {net: lenet, rate: 1}\n")
    Path("weighted.yaml").write_text("data: {dataset: shapes}\nmodel: {net: lenet, class_weights: balanced}\n")
    Path("broken.yaml").write_text("model: [1\n")
    with pytest.raises(UsageError, match=answer):
        bench(line.split())


def test_a_step_is_measured_without_the_metrics_of_a_recipe() -> None:
    metric = "{class_path: torchmetrics.classification.MulticlassRecall, init_args: {num_classes: 10}}"
    model = f"{{net: lenet, metrics: {{recall: {metric}}}, monitor: recall}}"
    Path("own.yaml").write_text(f"model: {model}\ndata: {{dataset: shapes}}\n")
    assert measured(["step", "--recipe", "own.yaml", "--data.count", "90", "--accelerator", "cpu", *TURNS])


# ---- what measurements make of their numbers


def test_a_spread_is_median_and_quartiles_and_of_fewer_than_four_values_their_range() -> None:
    assert spread([4.0, 1.0, 2.0, 3.0, 5.0]) == {"n": 5, "median": 3.0, "low": 2.0, "high": 4.0}
    assert spread([4.0, 1.0, 7.0]) == {"n": 3, "median": 4.0, "low": 1.0, "high": 7.0}
    assert spread_text(spread([1000.0, 3000.0]), "images/s") == "2,000 images/s (1,000 … 3,000, n = 2)"
    assert spread_text(spread([7.123456]), "s") == "7.123 s (n = 1)"
    assert spread_text(7.0, "×") == "7 ×"  # a count


def test_figures_are_written_whole_or_not_at_all(here: Path) -> None:
    file = here / "figures.json"
    write_figures(file, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_figures(file, {"a": float("nan")})
    assert json.loads(file.read_text()) == {"a": 1}
    with pytest.raises(Failure, match="Choose another place"):
        write_figures(file / "below" / "a.json", {"a": 1})


def test_every_gpu_is_measured_by_itself() -> None:
    machine = Machine("c", 4, True, gpus=(("A", 1), ("B", 1)))
    assert {name: one["devices"] for name, one in devices_of(machine).items()} == {"cpu": 1, "gpu 0, A": [0], "gpu 1, B": [1]}


# ---- trainings in processes of their own


def test_flags_are_told_without_the_places_of_files() -> None:
    argv = ["--data-dir", "/a", "--epochs", "2", "--data.root=/b", "--data.cache_dir", "/c", "--lr=1", "--data-dir"]
    assert without_places(argv) == ["--epochs", "2", "--lr=1"]


def test_scaling_compares_runs_of_the_same_seed_with_the_first_number_of_devices() -> None:
    shared: dict[str, Any] = {"images_per_second": 1.0, "test": {"accuracy": 0.5}}
    runs = {devices: [{**shared, "train_seconds": seconds * run} for run in (1, 2)] for devices, seconds in ((1, 8.0), (2, 4.0))}
    values = {label: value for label, value, _ in rows_of(runs)}
    assert values["2 devices"] == {"n": 2, "median": 6.0, "low": 4.0, "high": 8.0}
    assert values["2 devices, speed-up"] == {"n": 2, "median": 2.0, "low": 2.0, "high": 2.0}
    assert "1 device, speed-up" not in values


def test_scaling_trains_in_processes_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    figures = measured(["scaling", "--devices", "1", "--recipe", "small.yaml"])
    assert (figures["settings"]["recipe"], figures["settings"]["flags"]) == ("small", ["--recipe", "small.yaml"])
    assert "run 1 of 1: " in capsys.readouterr().err


def test_a_training_in_its_own_process_that_fails_says_why() -> None:
    with pytest.raises(UsageError, match=r"^no recipe is called 'tudoi'\. Did you mean tudui"):
        train(["--recipe", "tudoi"])


# ---- how long they take, and how they end


def test_progress_says_what_is_done_and_how_long_all_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = Progress(4, "round")
    progress.announce(40, "4 rounds")
    for done, now in ((1, 5.0), (2, 20.0), (2.5, 21.0), (3, 300.0), (4, 400.0)):
        progress.advance(done, f"of {now:g}")
    assert capsys.readouterr().err.splitlines() == [
        "this takes about 40 s: 4 rounds",
        "round 3 of 4, of 20 · 20 s of about 40 s",
        "round 4 of 4, of 300 · 5 min of about 7 min",
    ]


ENDLESS = ["--rounds", "100000"]
STOPPED = {  # the line after which the signal comes
    "step": (["step", *SMALL, *ENDLESS], signal.SIGINT, "this takes"),
    "tutorial": (["tutorial", *SMALL, "--steps", "1", *ENDLESS], signal.SIGINT, "this takes"),
    "input": (["input", *SMALL, "--batches", "1", *ENDLESS], signal.SIGINT, "this takes"),
    "scaling": (["scaling", "--recipe", "small.yaml", "--epochs", "100000"], signal.SIGTERM, "training 1 of 2"),
    "recipe": (["recipe", "small.yaml", "--epochs", "100000"], signal.SIGHUP, "training 1 of 3"),
}


@pytest.mark.parametrize("what", STOPPED)
def test_a_signal_ends_a_measurement_with_what_it_has_and_no_process_left(what: str) -> None:
    argv, number, running = STOPPED[what]
    command = [sys.executable, "-m", "cifar_lit", "bench", *argv, "--json", "f.json"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=child_environment(), start_new_session=True
    )
    assert process.stderr and any(line.startswith(running) for line in process.stderr)
    time.sleep(2)  # some rounds
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)  # typed, it reaches the group
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    said = [line for line in err.splitlines() if not line.startswith(("round ", "training "))]
    assert said[0].startswith("cifar-lit: stopped") and len(said) <= 2  # how to go on
    if what in ("scaling", "recipe"):
        assert not Path("f.json").exists()  # nothing was finished
    else:
        assert "ours / " in out and json.loads(Path("f.json").read_text())["headline"]["ours"]["n"] < 100000
    time.sleep(0.5)
    assert living_processes(process.pid) == []


def living_processes(session: int) -> list[str]:
    """What /proc says of the processes of a session that have not ended."""
    lines = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            lines.append(stat.read_text())
    fields = {line: line.rpartition(") ")[2].split() for line in lines}  # of proc(5) from the third on
    return [line for line in lines if fields[line][3] == str(session) and fields[line][0] != "Z"]
