"""The drills in their short forms, in a process of their own, from which they fork; and what they compare by."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cifar_lit.cli.drill import DRILLS, drill
from cifar_lit.drills.checkpoint import classes, damaged_files
from cifar_lit.drills.exact import LARGEST, check_own_test, sizes_from, unequal_scores
from cifar_lit.drills.kill import KINDS, NINE, ONE_OF_TWO, TERM, draw_plan
from cifar_lit.drills.phases import PHASES
from cifar_lit.drills.ranks import FAULTS, FULL, OWN, chosen
from cifar_lit.drills.signs import HANG, KILL
from cifar_lit.drills.soak import grown
from cifar_lit.drills.starts import left_behind
from cifar_lit.drills.survivors import differences, plain, unequal
from cifar_lit.errors import Failure, UsageError
from cifar_lit.training.checkpoint import AtomicCheckpointIO, read_checkpoint

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="drills fork their trainings")

ALL = """
import sys
import time
from cifar_lit.cli import main
folder, *names = sys.argv[1:]
codes = [main(["drill", name, "--short", "--json", f"{folder}/{name}.json"]) for name in names]
sys.exit(max(codes))
"""


@pytest.fixture(scope="module")
def drilled(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The figures of all drills, and what they printed."""
    folder = tmp_path_factory.mktemp("drills")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-c", ALL, str(folder), *DRILLS]
    done = subprocess.run(line, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in DRILLS}, done.stdout


def test_killed_and_resumed_trainings_end_as_if_nothing_had_been(drilled: tuple[dict[str, Any], str]) -> None:
    figures, said = drilled[0]["kill"], drilled[1]
    assert figures["headline"]["kills that hit"] == figures["settings"]["kills"] == 6
    assert sum(count for by in figures["fell"].values() for count in by.values()) == 6
    assert set(figures["fell"]) == set(PHASES.values())
    for kind, found in figures["kinds"].items():
        assert found["survivors"] == found["equal to 1e-05" if "gone on with" in kind else "identical"]
    assert sum(found["survivors"] for found in figures["kinds"].values()) >= 2
    assert figures["starts"]["kills"] == figures["starts"]["identical"] == 1
    assert "where the kills fell" in said and "by the way of training" in said


def test_no_damaged_checkpoint_is_loaded(drilled: tuple[dict[str, Any], str]) -> None:
    figures = drilled[0]["checkpoint"]
    assert {row["way"] for row in figures["damaged"]} == {"cut", "bit flipped", "page blanked"}
    assert all(row["detected"] == row["files"] > 0 for row in figures["damaged"])
    flipped = [row for row in figures["damaged"] if (row["way"], row["place"]) == ("bit flipped", "tensors")]
    assert flipped[0]["torch_alone_loads"] == flipped[0]["files"]  # so that there was something to detect


def test_a_checkpoint_scores_the_same_to_the_last_digit_on_any_number_of_processes(drilled: tuple[dict[str, Any], str]) -> None:
    figures = drilled[0]["exact"]
    sizes = sizes_from(figures["settings"]["sizes"])
    assert [row["processes"] for row in figures["processes"]] == [1, 2, 3]
    assert all(row["equal"] == row["sizes"] == len(sizes) for row in figures["processes"])
    assert [row["sizes_with_an_idle_process"] for row in figures["processes"]] == [0, 5, 6]
    assert [row["size"] for row in figures["scores"]] == [1, 2, 31, 32, 33, 97, 1003]
    assert figures["scores"][-1]["accuracy"] > 0.2  # ten classes: the checkpoint has learned something


def test_scores_that_differ_in_one_digit_are_told() -> None:
    score = {"size": 3, "accuracy": 1 / 3, "loss": 1.5, "per_class": [float("nan"), 0.5], "confusion": [[1, 0], [0, 2]]}
    assert unequal_scores(score, [dict(score), {**score, "per_class": [float("nan"), 0.5]}]) == []
    for other in (
        {"accuracy": 0.3333333333333334},
        {"loss": 1.500001},
        {"per_class": [0.0, 0.5]},
        {"confusion": [[1, 0], [1, 1]]},
    ):
        assert unequal_scores(score, [score, {**score, **other}]) == list(other)
    own = {"accuracy": 0.25, "loss": 2.0, "images": LARGEST}
    check_own_test({LARGEST: own}, dict(own))
    check_own_test({3: {**own, "loss": 2.1}}, own)
    with pytest.raises(Failure, match=r"own test differs: loss 2\.0, and here 2\.1"):
        check_own_test({LARGEST: {**own, "loss": 2.1}}, own)


def test_sizes_are_read_as_lists_and_ranges() -> None:
    assert sizes_from("1,4-6, 5,1003") == [1, 4, 5, 6, 1003]
    for text in ("", "0", "1004", "a", "3-", "5-3"):
        with pytest.raises(UsageError, match="--sizes"):
            sizes_from(text)


def test_a_long_training_holds_no_more_than_a_short_one(drilled: tuple[dict[str, Any], str]) -> None:
    early, late = drilled[0]["soak"]["samples"]
    assert (early["epoch"], late["epoch"]) == (20, 40)
    assert late["curves"] > early["curves"]
    assert grown(early, late) == []


def test_a_run_that_loses_a_rank_ends_soon_names_it_leaves_nothing_and_goes_on(drilled: tuple[dict[str, Any], str]) -> None:
    figures = drilled[0]["ranks"]
    assert [case["way"] for case in figures["cases"]] == [OWN, OWN]
    assert {case["fault"] for case in figures["cases"]} == {KILL, HANG}
    for case in figures["cases"]:
        assert f"rank {case['rank']} (process " in case["said"]
        assert 0 not in case["codes"]
        assert (case["left"], case["missed"]) == (0, [])
        assert case["seconds"] < 2 * figures["settings"]["limit"] + 20  # on a busy machine the processes take long to end
    assert "a rank is lost" in drilled[1]


def test_each_fault_meets_each_rank_that_feels_it_and_a_few_cases_are_spread_over_all() -> None:
    every = chosen(list(FAULTS), None, root=True)
    assert len(every) == len(set(every)) == sum(2 * len(faults) for faults in FAULTS.values()) - 1
    assert (OWN, FULL, 0) in every and (OWN, FULL, 1) not in every  # which writes nothing
    assert not any(case.fault == FULL for case in chosen(list(FAULTS), None, root=False))
    assert len({case.fault for case in chosen(list(FAULTS), 6, root=True)}) >= 4
    with pytest.raises(UsageError, match="no way to start is called 'mpi': there are --devices 2, torchrun, two machines"):
        drill(["ranks", "--ways", '["mpi"]'])


def test_growth_is_noticed_beyond_what_an_allocator_does() -> None:
    early = {"memory": 1000, "open_files": 10, "threads": 3, "files": 8, "disk": 500, "curves": 10}
    assert grown(early, {**early, "memory": 1015, "curves": 99}) == []
    for name in ("memory", "open_files", "threads", "files", "disk"):
        assert grown(early, {**early, name: early[name] * 2}) == [name]


def test_any_difference_between_two_values_is_found() -> None:
    value = {"a": [torch.tensor([1.0, 2.0]), 3], "b": {"path": "here/last.ckpt", "seconds": 4.0}}
    same = {"a": [torch.tensor([1.0, 2.0]), 3], "b": {"path": "there/last.ckpt", "seconds": 5.0}}
    assert unequal(plain(value), plain(same)) == []
    for other, place in [
        ({**same, "a": [torch.tensor([1.0, 2.0 + 2**-22]), 3]}, ".a.0"),
        ({**same, "a": [torch.tensor([1.0, 2.0], dtype=torch.float64), 3]}, ".a.0"),
        ({**same, "a": [torch.tensor([1.0, 2.0]), 3.0]}, ".a.1"),
        ({**same, "a": [torch.tensor([1.0, 2.0])]}, ".a"),
        ({**same, "c": None}, ".c"),
        ({**same, "b": {"path": "there/best.ckpt"}}, ".b.path"),
    ]:
        assert unequal(plain(value), plain(other)) == [place]


def test_what_a_killed_start_leaves_is_found_and_runs_do_not_count(tmp_path: Path) -> None:
    for name in ("lightning_logs/quickstart-1/config.yaml", "log.txt", "tmp/empty/deeper/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "tmp/empty/deeper/x").unlink()
    assert left_behind(tmp_path) == []
    for name in ("config.yaml", "tmp/empty/half"):
        (tmp_path / name).touch()
    assert sorted(left_behind(tmp_path)) == [tmp_path / "config.yaml", tmp_path / "tmp/empty/half"]


def test_up_to_rounding_only_fractions_may_differ_and_what_each_process_has() -> None:
    value = {"a": [torch.tensor([1.0, -200.0]), 0.5, 7, "x"], "b": torch.tensor([3, 4]), "random_state": [torch.zeros(2, 9)]}
    close = {"a": [torch.tensor([1.0 + 5e-6, -200.001]), 0.5 - 5e-6, 7, "x"], "b": torch.tensor([3, 4])}
    first, second = (plain(each, ("random_state",)) for each in (value, close))
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
        assert len(unequal(first, plain(other), tolerance=1e-5)) == 1


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


def test_every_byte_of_a_checkpoint_is_in_one_class_or_is_padding(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    path = run / "checkpoints" / "last.ckpt"
    covered = sorted((part.start, part.stop) for parts in classes(path).values() for part in parts)
    assert all(before[1] <= after[0] for before, after in pairwise(covered))
    assert covered[0][0] == 0 and covered[-1][1] == path.stat().st_size
    assert all(content != path.read_bytes() for _, _, content in damaged_files(path, 3, 20, random.Random(0)))
    copy = shutil.copy(path, tmp_path / "copy.ckpt")
    assert read_checkpoint(Path(copy))["global_step"] == 3


def test_plans_cover_every_way_and_phase_and_one_of_two_only_where_there_are_two() -> None:
    draw = random.Random(0)
    plans = [draw_plan(draw, 2.0, 2) for _ in range(500)]
    assert {plan.how for plan in plans} == {NINE, TERM, ONE_OF_TWO}
    assert {plan.phase for plan in plans} == {None, *PHASES.values()}
    assert all((plan.rank in (0, 1)) == (plan.how == ONE_OF_TWO) for plan in plans)
    assert {draw_plan(draw, 2.0, 1).how for _ in range(200)} == {NINE, TERM}
    assert {kind.processes for kind in KINDS.values()} == {1, 2}


def test_the_command_lists_its_drills_and_refuses_others(capsys: pytest.CaptureFixture[str]) -> None:
    drill([])
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in DRILLS)
    with pytest.raises(UsageError, match=r"no drill is called 'kil'\. Did you mean kill\?"):
        drill(["kil"])
    for words in (
        ["kill", "--kills", "0"],
        ["kill", "--starts", "0"],
        ["exact", "--sizes", "0"],
        ["checkpoint", "--cuts", "1"],
        ["soak", "--early", "500"],
        ["soak", "--epoch", "3"],
    ):
        with pytest.raises(UsageError):
            drill(words)


ORPHAN = """
import sys, time
from pathlib import Path
from cifar_lit.drills.forked import Forked, warm
from cifar_lit.drills.soak import TRAINING
warm()
training = Forked([*TRAINING, "--epochs", "10000"], Path(sys.argv[1]), Path(sys.argv[1]) / "log.txt")
print(training.pids[0], flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends a process with its parent")
def test_no_training_is_left_when_a_drill_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHAN, str(tmp_path)], stdout=subprocess.PIPE, text=True) as started:
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
