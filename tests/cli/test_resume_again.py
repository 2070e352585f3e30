"""Runs that are gone on with although something of them is damaged, left over, or in use."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import matches, metrics_of, refused, typed
from filelock import FileLock

from cifar_lit.files import PART
from cifar_lit.training.checkpoint import read_checkpoint


@pytest.fixture
def unfinished(here: Path, run: Path) -> Path:
    """A run of one's own that could be resumed."""
    shutil.copytree(run, here / "lightning_logs/small-1")
    (here / "lightning_logs/small-1/metrics.json").unlink()
    return here / "lightning_logs/small-1"


def test_the_last_whole_checkpoint_takes_the_place_of_a_damaged_one_and_both_are_named(unfinished: Path, run: Path) -> None:
    last = unfinished / "checkpoints/last.ckpt"
    last.write_bytes(last.read_bytes()[:-1000])
    answer = typed("--resume")
    assert answer.code == 0
    where = "lightning_logs/small-1/checkpoints"
    line = f"{where}/last.ckpt is cut short or damaged (…): going on from {where}/best.ckpt of step …"
    assert [matches(line, said) for said in answer.complaints] == [True], answer.err
    assert f"{where}/best.ckpt" in answer.out
    for part in ("val", "test"):
        assert metrics_of(unfinished)[part] == metrics_of(run)[part]
    assert read_checkpoint(last)["global_step"] == read_checkpoint(run / "checkpoints/last.ckpt")["global_step"]


def test_a_damaged_checkpoint_that_has_no_substitute_is_named(unfinished: Path) -> None:
    last = unfinished / "checkpoints/last.ckpt"
    last.write_bytes(last.read_bytes()[:-1000])
    line = "cifar-lit: …last.ckpt is cut short or damaged ({}): use another checkpoint"
    refused(typed("--resume", last), line.format("…"), 1)  # it was named itself
    for path in (unfinished / "checkpoints").iterdir():
        path.write_bytes(b"")
    refused(typed("--resume"), line.format("the file is empty"), 1)
    assert not list(unfinished.glob(".*"))


def test_a_run_goes_on_from_its_previous_checkpoint_and_only_what_a_kill_left_half_written_goes(unfinished: Path) -> None:
    (unfinished / "checkpoints/last.ckpt").rename(unfinished / "checkpoints/previous.ckpt")
    left = [unfinished / f"checkpoints/last.ckpt{PART}", unfinished / f"metrics.json{PART}"]
    own = [unfinished / "notes.part", unfinished / "checkpoints/mine.ckpt"]
    for path in (*left, *own):
        path.write_text("text")
    answer = typed("--resume")
    assert (answer.code, answer.err) == (0, "")
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in own)


def test_a_run_in_use_is_refused_with_process_and_machine_and_is_free_after_a_kill(unfinished: Path) -> None:
    imports = "import time; from pathlib import Path; from cifar_lit.runs.run_folder import RunFolder"
    # a lock that nothing refers to is given back
    hold = f"{imports}; run = RunFolder(Path(), '', Path({str(unfinished)!r})); print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        line = f"cifar-lit: process {other.pid} on {socket.gethostname()} is writing …small-1: wait until it ends, or …"
        refused(typed("--resume"), line, 1)
        other.kill()
    assert typed("--resume").code == 0
    assert not list(unfinished.glob(".*"))


def test_a_run_that_came_to_its_end_while_this_one_started_is_not_run_again(
    unfinished: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire = FileLock.acquire

    def late(lock: FileLock, **kept: Any) -> Any:
        shutil.copy(run / "metrics.json", unfinished / "metrics.json")
        return acquire(lock, **kept)

    monkeypatch.setattr(FileLock, "acquire", late)
    refused(typed("--resume"), "cifar-lit: …small-1 is finished: its results are in …", 2)
    assert not list(unfinished.glob(".*"))


def test_a_folder_that_another_process_writes_is_left_alone(unfinished: Path) -> None:
    with FileLock(unfinished / ".lock"):
        answer = typed("--resume")
    refused(answer, "cifar-lit: another process is writing …small-1: wait until it ends, or start a new run without --resume", 1)


def test_a_resumed_run_keeps_its_recipe(unfinished: Path) -> None:
    line = "cifar-lit: --resume goes on with the recipe of lightning_logs/small-1: leave --recipe out"
    Path("other.yaml").write_text(Path("small.yaml").read_text())
    refused(typed("--resume", "--recipe", "other.yaml"), line, 2)


@pytest.mark.parametrize(
    ("flags", "other"),
    [
        (["--net", "tudui"], "tudui (3×16×16, 4 classes)"),
        (["--data.num_classes", "5"], "lenet (3×16×16, 5 classes)"),
        (["--model.width", "2"], "lenet width 2 (3×16×16, 4 classes)"),
        (["--data.image_size", "20"], "lenet (3×20×20, 4 classes)"),
    ],
)
def test_a_checkpoint_of_another_net_is_told_with_both_nets(here: Path, run: Path, flags: list[str], other: str) -> None:
    checkpoint = run / "checkpoints/best.ckpt"
    line = f"cifar-lit: {checkpoint} holds weights of lenet (3×16×16, 4 classes), not of {other}: …"
    refused(typed("test", "--ckpt_path", checkpoint, *flags), line, 1)
    assert not (here / "lightning_logs").exists()
