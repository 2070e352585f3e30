"""Run folders: numbers, locks, and the checkpoint that `--resume` finds."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from cifar_lit.errors import Failure, UsageError
from cifar_lit.files import PART
from cifar_lit.runs import run_folder
from cifar_lit.runs.run_folder import (
    OWNER,
    RunFolder,
    check_unfinished,
    find_resumable,
    owner_of,
    read_curves,
    read_metrics,
    read_rows,
    run_of,
    stamp_start,
)


def test_each_run_gets_the_next_number_of_its_recipe_and_a_folder_of_its_own(tmp_path: Path) -> None:
    for name in ("a+b-7", "a+b-old", "a+bc-9", "a+b-8-copy", "aab-20", "a+b", "a+b-"):
        (tmp_path / "logs" / name).mkdir(parents=True)
    assert [RunFolder(tmp_path / "logs", name).path.name for name in ("a+b", "c", "a+b")] == ["a+b-8", "c-1", "a+b-9"]
    with ThreadPoolExecutor(50) as pool:
        paths = list(pool.map(lambda _: RunFolder(tmp_path, "fast").path, range(50)))
    assert sorted(path.name for path in paths) == sorted(f"fast-{number}" for number in range(1, 51))


def test_the_first_process_creates_the_folder_on_first_access_and_the_others_follow(tmp_path: Path) -> None:
    first, other = RunFolder(tmp_path / "logs", "fast"), RunFolder(tmp_path / "logs", "fast", first=False)
    first.release()
    assert other.path == tmp_path / "logs"
    assert not (tmp_path / "logs").exists()
    assert first.path == first.path == tmp_path / "logs" / "fast-1"
    for folder in (first, other):
        folder.follow(tmp_path / "logs" / "fast-7")
    assert (first.path.name, other.path.name) == ("fast-1", "fast-7")


def test_a_locked_folder_is_refused_and_after_its_release_exactly_one_process_gets_it(tmp_path: Path) -> None:
    first = RunFolder(tmp_path, "fast")
    path = first.path
    owner = f"process {os.getpid()} on {socket.gethostname()}"
    with pytest.raises(Failure, match=f"{owner} is writing {path}: wait until it"):
        RunFolder(tmp_path, "fast", path)
    first.release()
    first.release()
    assert list(path.iterdir()) == []

    def resume(_: int) -> RunFolder | None:
        with suppress(Failure):
            return RunFolder(tmp_path, "fast", path)
        return None

    for _ in range(3):
        with ThreadPoolExecutor(12) as pool:
            (resumed,) = filter(None, pool.map(resume, range(12)))
        assert (resumed.resumed, resumed.path) == (True, path)
        resumed.release()
        assert list(path.iterdir()) == []


HOLD = """
import sys, time
from pathlib import Path
from cifar_lit.runs.run_folder import RunFolder
run = RunFolder(Path(sys.argv[1]), "fast")
(run.path / sys.argv[2]).touch()
print(run.path, flush=True)
time.sleep(60)
"""


def test_a_killed_process_holds_no_lock_and_its_partial_files_are_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path), f"last.ckpt{PART}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        with pytest.raises(Failure, match=f"process {process.pid} on"):
            RunFolder(tmp_path, "fast", path)
        process.kill()
    (path / "own.part").touch()
    assert owner_of(path) == f"process {process.pid} on {socket.gethostname()}"
    after = RunFolder(tmp_path, "fast", path)
    assert owner_of(path) == f"process {os.getpid()} on {socket.gethostname()}"
    assert capsys.readouterr().err == ""
    after.release()
    assert [file.name for file in path.iterdir()] == ["own.part"]


LEFT = "filelock/2\npid=41\nhost={}\nmode=lease\ntoken=0\nduration=0.1\n"


@pytest.mark.parametrize("text", ["", "{", "process 41 on node-7\n", LEFT.format("a\x1b[2J"), LEFT.format("node-7")])
def test_an_expired_lock_of_another_machine_is_reported_and_an_unreadable_lock_is_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(run_folder, "LEASE_SECONDS", 0.1)
    (tmp_path / OWNER).write_text(text)
    RunFolder(tmp_path, "fast", tmp_path).release()
    line = f"{tmp_path} was left unfinished by process 41 on node-7; resuming it\n"
    assert capsys.readouterr().err == (line if text == LEFT.format("node-7") else "")
    assert list(tmp_path.iterdir()) == []


# ---- existing runs


def make_run(logs: Path, name: str, age: int = 0) -> Path:
    """Create the run folder of a training, last written `age` seconds ago."""
    (logs / name / "checkpoints").mkdir(parents=True)
    config = logs / name / "config.yaml"
    config.touch()
    written = config.stat().st_mtime - age
    os.utime(config, (written, written))
    for file in ("last.ckpt", "best.ckpt"):
        (logs / name / "checkpoints" / file).touch()
    return logs / name


def test_the_newest_training_is_resumed_or_the_given_one(tmp_path: Path) -> None:
    older, newest = make_run(tmp_path, "fast-1", age=300), make_run(tmp_path, "lenet-1", age=100)
    make_run(tmp_path, "fast-2", age=200)
    (tmp_path / "fast-3").mkdir()  # the run of a test, without checkpoints
    (tmp_path / "fast-3" / "config.yaml").touch()
    assert find_resumable(tmp_path, None) == newest / "checkpoints" / "last.ckpt"
    assert find_resumable(tmp_path, str(older)) == older / "checkpoints" / "last.ckpt"
    best = older / "checkpoints" / "best.ckpt"
    assert find_resumable(tmp_path, str(best)) == best
    with pytest.raises(UsageError, match=r"nothing to resume: .* holds no run"):
        find_resumable(tmp_path / "none", None)
    for place in ("fast-3", "typo", "fast-1/checkpoints/previous.ckpt"):
        with pytest.raises(UsageError, match="there is no checkpoint"):
            find_resumable(tmp_path, str(tmp_path / place))
    assert (run_of(best), run_of(tmp_path / "own.ckpt")) == (older.resolve(), None)
    (older / "config.yaml").unlink()
    assert run_of(best) is None


def test_resume_prefers_the_newest_unfinished_run_with_a_checkpoint_and_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, "old-1", age=400)
    unfinished = make_run(tmp_path, "cut-1", age=300)
    (make_run(tmp_path, "fitted-1", age=200) / "metrics.json").write_text('{"val": {"accuracy": 0.5}}')
    newest = make_run(tmp_path, "tested-1", age=100)
    (newest / "metrics.json").write_text('{"test": {"accuracy": 0.5}}')
    assert find_resumable(tmp_path, None, needs_test=False) == unfinished / "checkpoints/last.ckpt"
    assert capsys.readouterr().err == f"resuming {unfinished}: the newest run, {newest}, is finished\n"
    assert find_resumable(tmp_path, None, needs_test=True).parent.parent.name == "fitted-1"
    assert find_resumable(tmp_path, None).parent.parent == newest  # in a restarted job
    crashed = make_run(tmp_path, "crashed-1")
    for checkpoint in (crashed / "checkpoints").iterdir():
        checkpoint.unlink()
    capsys.readouterr()
    assert find_resumable(tmp_path, None, needs_test=False, first=False) == unfinished / "checkpoints/last.ckpt"
    assert capsys.readouterr().err == ""
    find_resumable(tmp_path, None, needs_test=False)
    assert capsys.readouterr().err == f"resuming {unfinished}: the newest run, {crashed}, has no checkpoint\n"


@pytest.mark.parametrize("name", [None, "logs/fast-1/checkpoints/last.ckpt"])
@pytest.mark.parametrize("place", ["metrics.csv", "checkpoints/best.ckpt", "plots", "deep/down/there"])
def test_a_run_with_a_symlink_that_leaves_its_folder_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(Path("logs"), "fast-1")
    (run / "deep/down").mkdir(parents=True)
    (run / "deep/checkpoints").symlink_to("../checkpoints")
    (run / "deep/loop").symlink_to("loop")
    checkpoint = find_resumable(Path("logs"), name)
    (run / place).unlink(missing_ok=True)
    (run / place).symlink_to(tmp_path / "logs/fast-10")  # a missing target
    with pytest.raises(Failure, match=f"^logs/fast-1/{place} is a symlink pointing outside its folder"):
        find_resumable(Path("logs"), name)
    (run / place).unlink()
    run.rename("elsewhere")
    run.symlink_to(tmp_path / "elsewhere")  # the run itself may be on another disk
    assert find_resumable(Path("logs"), name) == checkpoint


def test_the_run_that_started_last_is_the_newest_even_if_another_run_is_dated_in_the_future(tmp_path: Path) -> None:
    make_run(tmp_path, "fast-1", age=-24 * 3600)  # started before the clock was set back
    for name in ("fast-2", "fast-3", "fast-2"):  # the last is resumed
        run = tmp_path / name if (tmp_path / name).exists() else make_run(tmp_path, name)
        stamp_start(run)
        assert find_resumable(tmp_path, None) == run / "checkpoints" / "last.ckpt"
    (tmp_path / "fast-1" / "config.yaml").unlink()
    config = make_run(tmp_path / "other", "fast-1") / "config.yaml"
    before = config.stat().st_mtime_ns
    stamp_start(config.parent)
    assert config.stat().st_mtime_ns == before


def test_a_run_is_finished_after_its_test_or_after_the_fit_if_no_test_is_needed(tmp_path: Path) -> None:
    check_unfinished(tmp_path, needs_test=False)
    (tmp_path / "metrics.json").write_text(json.dumps({"val": {"accuracy": 0.5}, "test": None}))
    check_unfinished(tmp_path, needs_test=True)
    with pytest.raises(UsageError, match=r"is finished: its results are in .*metrics\.json"):
        check_unfinished(tmp_path, needs_test=False)
    (tmp_path / "metrics.json").write_text(json.dumps({"test": {"accuracy": 0.5}}))
    with pytest.raises(UsageError, match="is finished"):
        check_unfinished(tmp_path, needs_test=True)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null"])
def test_unreadable_metrics_and_curves_are_empty(tmp_path: Path, text: str) -> None:
    for name in ("metrics.json", "metrics.csv"):
        (tmp_path / name).write_text(text)
    assert (read_metrics(tmp_path), read_curves(tmp_path)) == ({}, [])


@pytest.mark.parametrize(
    "damage",
    [{"parameters": []}, {"epochs": "3"}, {"test": {"accuracy": []}}, {"test": {"accuracy": 2}},
     {"test": {"images": []}}, {"test": {"fingerprint": 1}}, {"test": {"tta": {"views": "mirror"}}},
     {"test": {"tta": [1]}}, {"test": {"tta": {"views": "mirror", "accuracy": None}}}, {"val": {"loss": []}}],
)  # fmt: skip
def test_metrics_with_invalid_values_are_empty(tmp_path: Path, damage: dict[str, object]) -> None:
    whole = {"parameters": 3, "test": {"accuracy": None, "loss": 1.5, "tta": {"views": "mirror", "accuracy": 0.5}}}
    (tmp_path / "metrics.json").write_text(json.dumps(whole))
    assert read_metrics(tmp_path) == whole
    (tmp_path / "metrics.json").write_text(json.dumps({**whole, **damage}))
    assert read_metrics(tmp_path) == {}


def test_a_table_with_too_many_cells_or_a_huge_line_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "metrics.csv"
    file.write_text("a,b,c\n" + "1,,3\n" * 4)
    assert read_rows(file) == [{"a": "1", "c": "3"}] * 4
    monkeypatch.setattr("cifar_lit.runs.run_folder.MAX_CELLS", 11)  # each row counts as 1, and 2 cells
    assert read_rows(file) == []
    assert read_rows(file, ("c",)) == [{"c": "3"}] * 4
    monkeypatch.setattr("cifar_lit.runs.run_folder.MAX_LINE", 5)
    file.write_text("a\n1\n" + "2" * 5 + "\n3\n")
    assert read_rows(file) == [{"a": "1"}, {"a": "3"}]


def test_a_group_folder_with_a_link_to_outside_is_not_continued(tmp_path: Path) -> None:
    (tmp_path / "logs/small-seeds-1").mkdir(parents=True)
    (tmp_path / "logs/small-seeds-1/.owner").symlink_to(tmp_path / "outside")
    with pytest.raises(Failure, match=r"small-seeds-1/\.owner is a symlink pointing outside"):
        RunFolder(tmp_path / "logs", "small-seeds", tmp_path / "logs/small-seeds-1")
    assert not (tmp_path / "outside").exists()
