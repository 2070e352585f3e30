"""Run folders: numbers, locks, and the checkpoint that `--resume` finds."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from cifar_lit.base.errors import Failure, UsageError
from cifar_lit.base.files import PART
from cifar_lit.run.folder import RunFolder
from cifar_lit.run.record import read_curves, read_metrics
from cifar_lit.run.resume import find_resumable, run_of


def test_each_run_gets_the_next_number_of_its_recipe_and_a_folder_of_its_own(tmp_path: Path) -> None:
    for name in ("a+b-7", "a+b-old", "a+bc-9", "a+b-8-copy", "aab-20", "a+b", "a+b-"):
        (tmp_path / "logs" / name).mkdir(parents=True)
    names = [RunFolder(tmp_path / "logs", name).claim().name for name in ("a+b", "c", "a+b")]
    assert names == ["a+b-8", "c-1", "a+b-9"]
    with ThreadPoolExecutor(50) as pool:
        paths = list(pool.map(lambda _: RunFolder(tmp_path, "fast").claim(), range(50)))
    assert sorted(path.name for path in paths) == sorted(f"fast-{number}" for number in range(1, 51))


def test_the_first_process_claims_the_folder_once_and_the_others_follow(tmp_path: Path) -> None:
    first, other = RunFolder(tmp_path / "logs", "fast"), RunFolder(tmp_path / "logs", "fast", first=False)
    first.release()
    assert other.path == tmp_path / "logs"
    assert not (tmp_path / "logs").exists()
    assert first.claim() == first.claim() == tmp_path / "logs" / "fast-1"
    for folder in (first, other):
        folder.follow(tmp_path / "logs" / "fast-7")
    assert (first.path.name, other.path.name) == ("fast-1", "fast-7")


def test_a_folder_that_was_deleted_before_a_checkpoint_was_written_cannot_be_resumed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "fast")
    (folder.claim() / "checkpoints").mkdir()
    (folder.path / "checkpoints/best.ckpt").touch()
    assert not folder.resumable
    (folder.path / "config.yaml").touch()
    assert folder.resumable


def test_a_locked_folder_is_refused_and_after_its_release_exactly_one_process_gets_it(tmp_path: Path) -> None:
    first = RunFolder(tmp_path, "fast")
    path = first.claim()
    with pytest.raises(Failure, match=f"another process is writing {path}: wait until it"):
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
from cifar_lit.run.folder import RunFolder
run = RunFolder(Path(sys.argv[1]), "fast")
(run.claim() / sys.argv[2]).touch()
print(run.path, flush=True)
time.sleep(60)
"""


def test_a_killed_process_holds_no_lock_and_its_partial_files_are_removed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path), f"last.ckpt{PART}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        with pytest.raises(Failure, match="another process is writing"):
            RunFolder(tmp_path, "fast", path)
        process.kill()
    (path / "own.part").touch()
    after = RunFolder(tmp_path, "fast", path)
    after.release()
    assert [file.name for file in path.iterdir()] == ["own.part"]


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
    assert find_resumable(tmp_path, "", needs_test=True) == newest / "checkpoints" / "last.ckpt"
    assert find_resumable(tmp_path, str(older), needs_test=True) == older / "checkpoints" / "last.ckpt"
    best = older / "checkpoints" / "best.ckpt"
    assert find_resumable(tmp_path, str(best), needs_test=True) == best
    with pytest.raises(UsageError, match=r"nothing to resume: .* holds no run"):
        find_resumable(tmp_path / "none", "", needs_test=True)
    for place in ("fast-3", "typo", "fast-1/checkpoints/previous.ckpt"):
        with pytest.raises(UsageError, match="there is no checkpoint"):
            find_resumable(tmp_path, str(tmp_path / place), needs_test=True)
    assert (run_of(best), run_of(tmp_path / "own.ckpt")) == (older.resolve(), None)


def test_resume_prefers_the_newest_unfinished_run_with_a_checkpoint_and_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, "old-1", age=400)
    unfinished = make_run(tmp_path, "cut-1", age=300)
    (make_run(tmp_path, "fitted-1", age=200) / "metrics.json").write_text('{"val": {"accuracy": 0.5}}')
    newest = make_run(tmp_path, "tested-1", age=100)
    (newest / "metrics.json").write_text('{"test": {"accuracy": 0.5}}')
    assert find_resumable(tmp_path, "", needs_test=False) == unfinished / "checkpoints/last.ckpt"
    assert capsys.readouterr().err.startswith(f"resuming {unfinished}: the newest run, {newest}, is finished")
    assert find_resumable(tmp_path, "", needs_test=True).parent.parent.name == "fitted-1"


def test_a_row_that_is_cut_short_is_left_out_and_empty_cells_are_dropped(tmp_path: Path) -> None:
    assert (read_metrics(tmp_path), read_curves(tmp_path)) == ({}, [])  # before the first row
    (tmp_path / "metrics.csv").write_text("step,loss,lr\n1,,3\n2,0.5")
    assert read_curves(tmp_path) == [{"step": 1.0, "lr": 3.0}]
