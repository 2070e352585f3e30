"""Run folders: their numbers, their lock, and what `--resume` goes on from."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cifar_lit.errors import Failure, UsageError
from cifar_lit.runs.run_folder import (
    OWNER,
    RunFolder,
    RunLock,
    check_unfinished,
    display_path,
    find_resumable,
    owner_of,
    read_curves,
    read_metrics,
    run_number,
    run_of,
)

# ---- numbers


def test_runs_are_numbered_by_recipe_above_the_highest_there_is(tmp_path: Path) -> None:
    names = [RunFolder(tmp_path / "logs", name).path.name for name in ("fast", "fast", "lenet", "fast")]
    assert names == ["fast-1", "fast-2", "lenet-1", "fast-3"]
    for name in ("fast-7", "fast-old", "faster-9", "fast-8-copy"):
        (tmp_path / "logs" / name).mkdir()
    assert RunFolder(tmp_path / "logs", "fast").path.name == "fast-8"


@pytest.mark.parametrize(
    ("folder", "name", "number"),
    [("a-12", "a", 12), ("a-b-3", "a", 0), ("a-", "a", 0), ("a-1x", "a", 0), ("a", "a", 0), ("a+b.c-4", "a+b.c", 4),
     ("aab!c-4", "a+b.c", 0)],
)  # fmt: skip
def test_only_a_recipes_name_and_digits_make_a_run_number(folder: str, name: str, number: int) -> None:
    assert run_number(Path("logs") / folder, name) == number


def test_nothing_is_made_before_the_folder_is_looked_at(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "logs", "fast")
    run.release()
    assert not (tmp_path / "logs").exists()
    assert run.path == run.path == tmp_path / "logs" / "fast-1"
    assert run.path.is_dir()


def test_fifty_threads_that_start_together_get_fifty_folders(tmp_path: Path) -> None:
    with ThreadPoolExecutor(50) as pool:
        paths = list(pool.map(lambda _: RunFolder(tmp_path, "fast").path, range(50)))
    assert sorted(path.name for path in paths) == sorted(f"fast-{number}" for number in range(1, 51))


def test_further_processes_claim_nothing_and_follow_the_first(tmp_path: Path) -> None:
    other = RunFolder(tmp_path / "logs", "fast", first=False)
    assert other.path == tmp_path / "logs"
    assert not (tmp_path / "logs").exists()
    other.follow(tmp_path / "logs" / "fast-1")
    assert other.path == tmp_path / "logs" / "fast-1"
    first = RunFolder(tmp_path / "logs", "fast")
    claimed = first.path
    first.follow(tmp_path)
    assert first.path == claimed


def test_a_place_that_cannot_hold_runs_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(Failure, match=r"cannot make a run folder in .*logs: .*--logs DIR"):
        _ = RunFolder(tmp_path / "logs", "fast").path


# ---- the lock


def test_a_folder_is_refused_with_its_owner_until_it_is_released(tmp_path: Path) -> None:
    first = RunFolder(tmp_path, "fast")
    path = first.path
    with pytest.raises(Failure, match=f"process {os.getpid()} on {socket.gethostname()} is writing {path}: wait until it"):
        RunFolder(tmp_path, "fast", path)
    first.release()
    first.release()
    assert list(path.iterdir()) == []
    resumed = RunFolder(tmp_path, "fast", path)
    assert (resumed.resumed, resumed.path) == (True, path)
    resumed.release()


HOLD = """
import sys, time
from pathlib import Path
from cifar_lit.runs.run_folder import RunFolder
run = RunFolder(Path(sys.argv[1]), "fast")
print(run.path, flush=True)
time.sleep(60)
"""


def test_processes_get_folders_of_their_own_and_a_killed_one_holds_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        paths = [Path(process.stdout.readline().strip()) for process in processes if process.stdout]
        assert {path.name for path in paths} == {"fast-1", "fast-2"}
        with pytest.raises(Failure, match=f"process {processes[0].pid} on"):
            RunLock(paths[0]).acquire()
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.communicate()
    left = owner_of(paths[0])
    assert left is not None and left.pid == processes[0].pid
    after = RunLock(paths[0])
    after.acquire()
    assert owner_of(paths[0]) == (os.getpid(), socket.gethostname())
    assert capsys.readouterr().err == ""
    after.release()


def test_a_run_that_was_left_on_another_machine_is_gone_on_with_and_said_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / OWNER).write_text(json.dumps({"pid": 41, "host": "node-7"}))
    lock = RunLock(tmp_path)
    lock.acquire()
    assert capsys.readouterr().err == f"{tmp_path} was left by process 41 on node-7; going on with it\n"
    lock.release()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": "x", "host": "y"}'])
def test_a_record_that_cannot_be_read_hinders_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / OWNER).write_text(text)
    assert owner_of(tmp_path) is None
    lock = RunLock(tmp_path)
    lock.acquire()
    lock.release()


def test_of_many_that_want_the_same_run_at_once_exactly_one_gets_it(tmp_path: Path) -> None:
    locks = [RunLock(tmp_path) for _ in range(12)]

    def acquires(lock: RunLock) -> bool:
        try:
            lock.acquire()
        except Failure:
            return False
        return True

    for _ in range(3):
        with ThreadPoolExecutor(12) as pool:
            assert sum(pool.map(acquires, locks)) == 1
        for lock in locks:
            lock.release()
        assert list(tmp_path.iterdir()) == []


# ---- what is there


def make_run(logs: Path, name: str, *, age: int = 0, checkpoint: bool = True) -> Path:
    """A run folder as a training leaves it, last written `age` seconds ago."""
    (logs / name).mkdir(parents=True)
    config = logs / name / "config.yaml"
    config.write_text("seed_everything: 0\n")
    written = config.stat().st_mtime - age
    os.utime(config, (written, written))
    if checkpoint:
        (logs / name / "checkpoints").mkdir()
        for file in ("last.ckpt", "best.ckpt"):
            (logs / name / "checkpoints" / file).write_bytes(b"")
    return logs / name


def test_a_checkpoint_belongs_to_the_run_it_lies_in(tmp_path: Path) -> None:
    run = make_run(tmp_path, "fast-1")
    assert run_of(run / "checkpoints" / "best.ckpt") == run.resolve()
    assert run_of(tmp_path / "own.ckpt") is None
    (run / "config.yaml").unlink()
    assert run_of(run / "checkpoints" / "best.ckpt") is None


def test_the_newest_run_that_trained_is_resumed_or_the_one_that_is_named(tmp_path: Path) -> None:
    older = make_run(tmp_path, "fast-1", age=300)
    newest = make_run(tmp_path, "lenet-1", age=100)
    make_run(tmp_path, "fast-2", age=200)
    make_run(tmp_path, "fast-3", checkpoint=False)  # of a test
    assert find_resumable(tmp_path, None) == newest / "checkpoints" / "last.ckpt"
    assert find_resumable(tmp_path, str(older)) == older / "checkpoints" / "last.ckpt"
    assert find_resumable(tmp_path, str(older / "checkpoints" / "best.ckpt")) == older / "checkpoints" / "best.ckpt"


def test_nothing_to_resume_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing to resume: .* holds no run"):
        find_resumable(tmp_path / "none", None)
    run = make_run(tmp_path, "fast-1", checkpoint=False)
    for place in (run, tmp_path / "typo", run / "checkpoints" / "best.ckpt"):
        with pytest.raises(UsageError, match="there is no checkpoint"):
            find_resumable(tmp_path, str(place))


def test_a_run_with_its_test_is_finished_and_one_without_only_if_none_is_needed(tmp_path: Path) -> None:
    check_unfinished(tmp_path, needs_test=False)
    (tmp_path / "metrics.json").write_text(json.dumps({"val": {"accuracy": 0.5}, "test": None}))
    check_unfinished(tmp_path, needs_test=True)
    with pytest.raises(UsageError, match=r"is finished: its results are in .*metrics\.json"):
        check_unfinished(tmp_path, needs_test=False)
    (tmp_path / "metrics.json").write_text(json.dumps({"test": {"accuracy": 0.5}}))
    with pytest.raises(UsageError, match="is finished"):
        check_unfinished(tmp_path, needs_test=True)


@pytest.mark.parametrize("text", [None, "", "{", "[1]", "null"])
def test_metrics_and_curves_that_cannot_be_read_are_none(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        for name in ("metrics.json", "metrics.csv"):
            (tmp_path / name).write_text(text)
    assert (read_metrics(tmp_path), read_curves(tmp_path)) == ({}, [])


def test_paths_are_shown_as_one_would_type_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert display_path(tmp_path / "logs" / "a-1") == display_path(Path("logs/a-1")) == "logs/a-1"
    assert display_path(Path("/elsewhere/a-1")) == "/elsewhere/a-1"
