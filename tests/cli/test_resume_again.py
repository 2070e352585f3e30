"""Runs that are gone on with although something of them is damaged, left over, or in use."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import config_of, files_of, matches, metrics_of, refused, typed

from cifar_lit.files import PART
from cifar_lit.runs.run_folder import RunLock
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
    line = f"{where}/last.ckpt is cut short or damaged (its end is missing): going on from {where}/best.ckpt of step …"
    assert [matches(line, said) for said in answer.complaints] == [True], answer.err
    assert f"{where}/best.ckpt" in answer.out
    for part in ("val", "test"):
        assert metrics_of(unfinished)[part] == metrics_of(run)[part]
    assert read_checkpoint(last)["global_step"] == read_checkpoint(run / "checkpoints/last.ckpt")["global_step"]


def test_a_damaged_checkpoint_that_has_no_substitute_is_named(unfinished: Path) -> None:
    last = unfinished / "checkpoints/last.ckpt"
    last.write_bytes(last.read_bytes()[:-1000])
    line = "cifar-lit: …last.ckpt is cut short or damaged ({}): use another checkpoint"
    refused(typed("--resume", last), line.format("its end is missing"), 1)  # it was named itself
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
    imports = "import time; from pathlib import Path; from cifar_lit.runs.run_folder import RunLock"
    hold = f"{imports}; RunLock(Path({str(unfinished)!r})).acquire(); print('held', flush=True); time.sleep(60)"
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
    acquire = RunLock.acquire

    def late(lock: RunLock) -> None:
        shutil.copy(run / "metrics.json", unfinished / "metrics.json")
        acquire(lock)

    monkeypatch.setattr(RunLock, "acquire", late)
    refused(typed("--resume"), "cifar-lit: …small-1 is finished: its results are in …", 2)
    assert not list(unfinished.glob(".*"))


def test_checkpoints_within_epochs_are_kept_in_the_settings_and_pruned_at_the_end(here: Path) -> None:
    answer = typed("--recipe", "small.yaml", "--checkpoint-every", "2")
    assert (answer.code, answer.err) == (0, "")
    run = Path("lightning_logs/small-1")
    assert config_of(run)["checkpoint_every"] == 2
    assert [name for name in files_of(run) if name.endswith(".ckpt")] == ["checkpoints/best.ckpt", "checkpoints/last.ckpt"]
    assert typed("test", "--ckpt_path", run / "checkpoints/best.ckpt").code == 0


@pytest.mark.parametrize("value", ["often", "0", "10 minutes"])
def test_an_interval_that_cannot_be_meant_is_refused_before_anything_is_made(here: Path, value: str) -> None:
    line = f"cifar-lit: --checkpoint-every is a number of steps (500) or a time (10m, 90s, 1h), not {value}"
    refused(typed("--recipe", "small.yaml", "--checkpoint-every", value), line, 2)
    assert not Path("lightning_logs").exists()


def small_disk(folder: Path, size: int) -> list[str]:
    """The start of a command that runs with an empty file system of `size` KiB at `folder`, which only it sees."""
    mount = f'mount -t tmpfs -o size={size}k none "{folder}" && "$@"; code=$?; cp -r "{folder}/." "{folder}-copy"; exit $code'
    return ["unshare", "-Urm", "sh", "-c", mount, "sh"]


def test_a_disk_that_fills_up_leaves_the_previous_checkpoint_to_go_on_from(here: Path) -> None:
    (here / "disk").mkdir()
    (here / "disk-copy").mkdir()
    if subprocess.run([*small_disk(here / "disk", 100), "true"], check=False, capture_output=True).returncode:
        pytest.skip("the system lets no small file system be mounted")
    words = ["train", "--recipe", "small.yaml", "--epochs", "3"]
    assert typed(*words, "--logs", "whole").code == 0
    checkpoint = (here / "whole/small-1/checkpoints/last.ckpt").stat().st_size
    # room for two of them and the curves, but not for a third
    command = [
        *small_disk(here / "disk", 5 * checkpoint // 2 // 1024),
        sys.executable,
        "-m",
        "cifar_lit",
        *words,
        "--logs",
        "disk",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CIFAR_LIT_CACHE": str(here / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.splitlines()
    assert matches("cifar-lit: cannot write …/checkpoints/….ckpt: …. Free some space; what was saved before is intact.", line)
    left = here / "disk-copy/small-1"
    assert not list(left.rglob(f"*{PART}"))
    assert read_checkpoint(left / "checkpoints/last.ckpt")["global_step"] > 0
    answer = typed("--resume", left)
    assert (answer.code, answer.err) == (0, "")
    assert metrics_of(left)["test"] == metrics_of(here / "whole/small-1")["test"]
