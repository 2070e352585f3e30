import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cifar_lit.errors import Failure, UsageError
from cifar_lit.runs.run_folder import (
    RunFolder,
    check_unfinished,
    display_path,
    find_resumable,
    read_metrics,
    run_number,
    run_of,
    write_text,
)


def test_runs_of_a_recipe_are_numbered_from_one_and_each_recipe_for_itself(tmp_path: Path) -> None:
    names = [RunFolder(tmp_path / "logs", name).path.name for name in ("fast", "fast", "lenet", "fast")]
    assert names == ["fast-1", "fast-2", "lenet-1", "fast-3"]


def test_a_number_is_never_given_again_below_the_highest(tmp_path: Path) -> None:
    for name in ("fast-7", "fast-2", "fast-old", "faster-9", "fast-1-copy"):
        (tmp_path / name).mkdir()
    assert RunFolder(tmp_path, "fast").path.name == "fast-8"


@pytest.mark.parametrize(("folder", "number"), [("a-12", 12), ("a-b-3", 0), ("a-", 0), ("a-1x", 0), ("b-1", 0), ("a", 0)])
def test_only_a_recipes_name_and_digits_make_a_run_number(folder: str, number: int) -> None:
    assert run_number(Path("logs") / folder, "a") == number


def test_a_name_with_signs_of_patterns_is_taken_literally() -> None:
    assert run_number(Path("a+b.c-4"), "a+b.c") == 4
    assert run_number(Path("aab!c-4"), "a+b.c") == 0


def test_nothing_is_made_before_the_folder_is_looked_at(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "logs", "fast")
    run.release()
    assert not (tmp_path / "logs").exists()
    assert run.path.is_dir()
    assert run.path == run.path == tmp_path / "logs" / "fast-1"


def test_fifty_threads_that_start_together_get_fifty_folders(tmp_path: Path) -> None:
    with ThreadPoolExecutor(50) as pool:
        paths = list(pool.map(lambda _: RunFolder(tmp_path, "fast").path, range(50)))
    assert sorted(path.name for path in paths) == sorted(f"fast-{number}" for number in range(1, 51))


CLAIM = """
import sys
from pathlib import Path
from cifar_lit.runs.run_folder import RunFolder
print("ready", flush=True)
sys.stdin.readline()
held = [RunFolder(Path(sys.argv[1]), "fast") for _ in range(10)]
for run in held:
    print(run.path.name)
print("claimed", flush=True)
sys.stdin.readline()
"""


def test_processes_that_start_together_never_share_a_folder_and_lock_theirs(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CLAIM, str(tmp_path)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(5)]
    names = []
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            assert process.stdout is not None
            names += [process.stdout.readline().strip() for _ in range(10)]
            assert process.stdout.readline() == "claimed\n"
        with pytest.raises(Failure, match=rf"process {processes[-1].pid} on \S+ is writing .*: wait until"):
            RunFolder(tmp_path, "fast", tmp_path / names[-1])  # the last process's folder, held until that ends
    finally:
        for process in processes:
            process.communicate("end\n", timeout=20)
    assert len(names) == 50
    assert set(names) == {path.name for path in tmp_path.iterdir()}
    resumed = RunFolder(tmp_path, "fast", tmp_path / names[-1])
    assert resumed.resumed and resumed.path == tmp_path / names[-1]


def test_a_folder_is_free_again_once_it_is_released(tmp_path: Path) -> None:
    first = RunFolder(tmp_path, "fast")
    path = first.path
    with pytest.raises(Failure, match=f"process {os.getpid()} on {socket.gethostname()} is writing .*fast-1: wait"):
        RunFolder(tmp_path, "fast", path)
    first.release()
    assert list(path.iterdir()) == []
    RunFolder(tmp_path, "fast", path).release()


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
    (tmp_path / "own.ckpt").write_bytes(b"")
    assert run_of(tmp_path / "own.ckpt") is None
    (run / "config.yaml").unlink()
    assert run_of(run / "checkpoints" / "best.ckpt") is None


def test_the_newest_run_that_trained_is_resumed(tmp_path: Path) -> None:
    make_run(tmp_path, "fast-1", age=300)
    newest = make_run(tmp_path, "lenet-1", age=100)
    make_run(tmp_path, "fast-2", age=200)
    make_run(tmp_path, "fast-3", checkpoint=False)  # of a test
    assert find_resumable(tmp_path, None) == newest / "checkpoints" / "last.ckpt"


def test_a_run_or_one_of_its_checkpoints_may_be_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, "fast-1")
    assert find_resumable(tmp_path, str(run)) == run / "checkpoints" / "last.ckpt"
    assert find_resumable(tmp_path, str(run / "checkpoints" / "best.ckpt")) == run / "checkpoints" / "best.ckpt"


def test_nothing_to_resume_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing to resume: .* holds no run"):
        find_resumable(tmp_path / "none", None)
    run = make_run(tmp_path, "fast-1", checkpoint=False)
    for wanted in (run, tmp_path / "typo", run / "checkpoints" / "best.ckpt"):
        with pytest.raises(UsageError, match="there is no checkpoint"):
            find_resumable(tmp_path, str(wanted))


def test_a_run_with_its_test_is_finished_and_one_without_only_if_none_is_wanted(tmp_path: Path) -> None:
    run = make_run(tmp_path, "fast-1")
    for needs_test in (True, False):
        check_unfinished(run, needs_test)
    write_text(run / "metrics.json", json.dumps({"val": {"accuracy": 0.5}, "test": None}))
    check_unfinished(run, needs_test=True)
    with pytest.raises(UsageError, match=r"fast-1 is finished: its results are in .*metrics\.json"):
        check_unfinished(run, needs_test=False)
    write_text(run / "metrics.json", json.dumps({"test": {"accuracy": 0.5}}))
    for needs_test in (True, False):
        with pytest.raises(UsageError, match="is finished"):
            check_unfinished(run, needs_test)


@pytest.mark.parametrize("text", [None, "", "{", "[1]", "null"])
def test_metrics_that_cannot_be_read_are_none(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "metrics.json").write_text(text)
    assert read_metrics(tmp_path) == {}


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "first")
    write_text(tmp_path / "a.txt", "zweite Fassung, ä")
    assert (tmp_path / "a.txt").read_text() == "zweite Fassung, ä"
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]


def test_paths_are_shown_as_one_would_type_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert display_path(tmp_path / "logs" / "a-1") == "logs/a-1"
    assert display_path(Path("logs/a-1")) == "logs/a-1"
    assert display_path(Path("/elsewhere/a-1")) == "/elsewhere/a-1"
