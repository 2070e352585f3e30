"""What the stress tests compare runs by."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from stress.compare_runs import comparable, differences, unequal

from cifar_lit.training.checkpoint import AtomicCheckpointIO


def test_any_difference_between_two_values_is_found() -> None:
    value = {"a": [torch.tensor([1.0, 2.0]), 3], "b": {"path": "here/last.ckpt", "seconds": 4.0}}
    same = {"a": [torch.tensor([1.0, 2.0]), 3], "b": {"path": "there/last.ckpt", "seconds": 5.0}}
    assert unequal(comparable(value), comparable(same)) == []
    for other, place in [
        ({**same, "a": [torch.tensor([1.0, 2.0 + 2**-22]), 3]}, ".a.0"),
        ({**same, "a": [torch.tensor([1.0, 2.0], dtype=torch.float64), 3]}, ".a.0"),
        ({**same, "a": [torch.tensor([1.0, 2.0]), 3.0]}, ".a.1"),
        ({**same, "a": [torch.tensor([1.0, 2.0])]}, ".a"),
        ({**same, "c": None}, ".c"),
        ({**same, "b": {"path": "there/best.ckpt"}}, ".b.path"),
    ]:
        assert unequal(comparable(value), comparable(other)) == [place]


def test_up_to_rounding_only_fractions_may_differ_and_what_each_process_has() -> None:
    value = {"a": [torch.tensor([1.0, -200.0]), 0.5, 7, "x"], "b": torch.tensor([3, 4]), "random_state": [torch.zeros(2, 9)]}
    close = {"a": [torch.tensor([1.0 + 5e-6, -200.001]), 0.5 - 5e-6, 7, "x"], "b": torch.tensor([3, 4])}
    first, second = (comparable(each, ("random_state",)) for each in (value, close))
    assert unequal(first, second, tolerance=1e-5) == []
    assert unequal(first, second) == [".a.0", ".a.1"]
    half = torch.tensor([0.5, 0.5], dtype=torch.float16)
    assert unequal(half, torch.nextafter(half, half + 1), tolerance=1e-5) == []
    assert unequal(half, half + 0.01, tolerance=1e-5) == [""]
    for other in (
        {**close, "a": [torch.tensor([1.00002, -200.0]), 0.5, 7, "x"]},
        {**close, "a": [torch.tensor([1.0, float("nan")]), 0.5, 7, "x"]},
        {**close, "a": [torch.tensor([1.0, -200.0]), float("nan"), 7, "x"]},
        {**close, "a": [torch.tensor([1.0, -200.0]), 0.5, 8, "x"]},
        {**close, "a": [torch.tensor([1.0]), 0.5, 7, "x"]},
        {**close, "b": torch.tensor([3, 5])},
    ):
        assert len(unequal(first, comparable(other), tolerance=1e-5)) == 1


def make_run(folder: Path, weight: float = 1.0) -> Path:
    checkpoint = {"state_dict": {"weight": torch.tensor([weight])}, "global_step": 3}
    for name in ("last.ckpt", "best.ckpt"):
        AtomicCheckpointIO().save_checkpoint(checkpoint, folder / "checkpoints" / name)
    card = {"card": json.dumps({"net": "lenet", "std": [weight]}), "format": "1"}
    save_file({"weight": torch.tensor([weight])}, folder / "model.safetensors", metadata=card)
    (folder / "metrics.csv").write_text("step\n3\n")
    (folder / "metrics.json").write_text(json.dumps({"test": {"accuracy": weight}, "train_seconds": random.random()}))
    return folder


def test_runs_are_the_same_or_it_is_said_in_what_they_differ(tmp_path: Path) -> None:
    expected = make_run(tmp_path / "expected")
    assert differences(make_run(tmp_path / "same"), expected) == []
    files = ("last.ckpt: .state_dict.weight", "best.ckpt: .state_dict.weight")
    wanted = [*files, "model.safetensors: ..card.std.0", "model.safetensors: .weight", "metrics.json: test"]
    assert differences(make_run(tmp_path / "other", 1.0000001), expected) == wanted
    assert differences(tmp_path / "other", expected, tolerance=1e-6) == []
    assert differences(make_run(tmp_path / "far", 1.0001), expected, tolerance=1e-6) == wanted
    left = make_run(tmp_path / "left")
    (left / "metrics.csv").write_text("step\n3\n3\n")
    for name in (".lock", "metrics.json.part"):
        (left / name).touch()
    assert differences(left, expected) == ["metrics.csv", "file metrics.json.part"]


ORPHAN = """
import sys, time
from pathlib import Path
from stress.forked import SMALL_TRAINING, Forked, warm
warm()
training = Forked([*SMALL_TRAINING, "--epochs", "10000"], Path(sys.argv[1]), Path(sys.argv[1]) / "log.txt")
print(training.pids[0], flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends a process with its parent")
def test_no_training_is_left_when_a_test_is_killed(tmp_path: Path, environment: dict[str, str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    ) as started:
        assert started.stdout is not None
        pid = int(started.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        time.sleep(0.5)
        started.kill()
    deadline = time.monotonic() + 10
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
