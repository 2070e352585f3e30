"""Run folders that become unusable: missing, read-only, on a full disk, or on a file system without locks."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from contract.command_line import OWN_IMAGES, RECIPE, SMALL, Fork, draw_folder, run_command
from stress.compare_runs import differences
from stress.forked import Forked

from cifar_lit.errors import Failure
from cifar_lit.runs import run_folder
from cifar_lit.runs.run_folder import OWNER, RunFolder
from cifar_lit.training.callbacks import EpochLines

CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x00020000  # Linux's <sched.h>
MS_RDONLY, MS_REMOUNT = 1, 32  # Linux's <sys/mount.h>
NO_SMALL_DISK = 77  # exit code if the system does not allow mounts
CANNOT_MOUNT = "the system does not allow mounts"
TRAINING = (*SMALL, "--epochs", "4", "--logs", "disk", "--trainer.log_every_n_steps", "1")


@contextmanager
def in_the_second_epoch(fault: Callable[[], object]) -> Iterator[None]:
    """Call `fault` at the end of the second epoch, before its checkpoint is written."""
    original = EpochLines.on_train_epoch_end

    def on_train_epoch_end(self: EpochLines, trainer: Any, pl_module: Any) -> None:
        original(self, trainer, pl_module)
        if trainer.current_epoch == 1:
            fault()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EpochLines, "on_train_epoch_end", on_train_epoch_end)
        yield


@pytest.fixture
def folder(working_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working folder in which locks of dead processes expire soon."""
    monkeypatch.setattr(run_folder, "LEASE_SECONDS", 1.0)
    return working_folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run that every disturbed run must equal."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "small.yaml").write_text(RECIPE)
    with chdir(folder):
        answer = run_command(*TRAINING)
    assert answer.code == 0, answer.err
    return folder / "disk/small-1"


def check_resumed(run: Path, undisturbed: Path) -> None:
    answer = run_command("--resume", run)
    assert answer.code == 0, answer.err
    assert differences(run, undisturbed) == []


def test_a_training_whose_folder_disappears_ends_with_one_line_and_can_be_resumed_when_it_is_back(
    folder: Path, undisturbed: Path
) -> None:
    with in_the_second_epoch(lambda: (folder / "disk").rename(folder / "away")):
        answer = run_command(*TRAINING)
    (line,) = answer.error_lines
    assert answer.code == 1
    assert line.startswith("cifar-lit: cannot write ") and "disk/small-1" in line
    assert "No such file or directory" in line and "fix that, then use --resume" in line
    shutil.rmtree(folder / "disk", ignore_errors=True)
    (folder / "away").rename(folder / "disk")
    check_resumed(folder / "disk/small-1", undisturbed)


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[None]:
    """Mount an empty file system at `folder`, visible to this process only, and copy it beside `folder` at the end."""
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS):
        os._exit(NO_SMALL_DISK)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    if libc.mount(b"none", str(folder).encode(), b"tmpfs", 0, f"size={kilobytes}k".encode()):
        os._exit(NO_SMALL_DISK)
    yield
    shutil.copytree(folder, f"{folder}-copy")


@contextmanager
def read_only_in_the_second_epoch(disk: Path) -> Iterator[None]:
    """Remount the disk read-only, as a system does after a disk error."""

    def remount() -> None:
        if ctypes.CDLL(None).mount(b"none", str(disk).encode(), b"tmpfs", MS_REMOUNT | MS_RDONLY, None):
            os._exit(NO_SMALL_DISK)

    with small_disk(disk, 100_000), in_the_second_epoch(remount):
        yield


@contextmanager
def full_in_the_second_epoch(disk: Path) -> Iterator[None]:
    def fill() -> None:
        with suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1024))

    with small_disk(disk, 10_000), in_the_second_epoch(fill):
        yield
        (disk / "filler").unlink()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux mounts a small file system for one process")
@pytest.mark.parametrize(
    ("fault", "reason"),
    [(read_only_in_the_second_epoch, "Read-only file system"), (full_in_the_second_epoch, "No space left on device")],
)
def test_a_training_whose_disk_is_read_only_or_full_ends_with_one_line_and_can_be_resumed(
    folder: Path, undisturbed: Path, fault: Callable[[Path], Any], reason: str
) -> None:
    disk = folder / "disk"
    disk.mkdir()
    answer = Fork([*TRAINING], folder, "disk", around=fault(disk)).answer()
    if answer.code == NO_SMALL_DISK:
        pytest.skip(CANNOT_MOUNT)
    (line,) = answer.error_lines
    assert answer.code == 1
    assert line.startswith("cifar-lit: cannot write ") and reason in line and "then use --resume" in line
    shutil.copytree(folder / "disk-copy/small-1", folder / "again/small-1")
    check_resumed(folder / "again/small-1", undisturbed)


def decode_on_a_full_disk(folder: str, rank: int) -> list[int]:
    """Train in two ranks, of which `rank` has a full disk for its decoded images, and return their exit codes."""
    words = (
        *SMALL,
        *OWN_IMAGES,
        "--data-dir",
        "images",
        "--data.val_size",
        "4",
        "--devices",
        "2",
        "--rank-timeout",
        "5",
    )

    def command() -> int:
        from cifar_lit.cli import main

        is_full = os.environ["RANK"] == str(rank)
        os.environ["CIFAR_LIT_CACHE"] = str(Path(folder, "disk" if is_full else "cache"))
        with small_disk(Path(folder, "disk"), 4) if is_full else nullcontext():
            return main(list(words), "train")

    return Forked(command, Path(folder), Path(folder, "rank-{rank}.txt"), 2).wait()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_of_any_rank_is_reported_by_that_rank_and_ends_the_others(
    folder: Path, forking: Callable[..., Any], rank: int
) -> None:
    draw_folder(folder / "images", {"train/cat": 12, "train/dog": 12, "test/cat": 4, "test/dog": 4}, size=32)
    (folder / "disk").mkdir()
    codes = forking(decode_on_a_full_disk, folder=str(folder), rank=rank)
    if NO_SMALL_DISK in codes:
        pytest.skip(CANNOT_MOUNT)
    lines = [line for line in (folder / f"rank-{rank}.txt").read_text().splitlines() if "cifar-lit: " in line]
    assert codes == [1, 1], lines
    (line,) = lines
    assert "could not be written to" in line and "No space left on device; free 0.1 MB there" in line
    assert not (folder / "lightning_logs").exists()


# ---- file systems without locks


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setattr(run_folder, "LEASE_SECONDS", 1.0)
    return RunFolder(tmp_path, "fast")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_a_run_is_refused_only_while_its_owner_is_alive(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    path = run.path
    with pytest.raises(Failure, match=f"process {os.getpid()} on .* is writing {path}: wait until it ends"):
        RunFolder(path.parent, "fast", path)
    assert RunFolder(path.parent, "fast").path == path.with_name("fast-2")
    run.release()
    assert list(path.iterdir()) == []
    pid = os.fork()
    if not pid:
        run = RunFolder(path.parent, "fast", path)
        os._exit(0)
    os.waitpid(pid, 0)
    assert (path / OWNER).exists()
    RunFolder(path.parent, "fast", path).release()
    assert capsys.readouterr().err == ""


def test_without_locks_one_of_many_simultaneous_resumes_succeeds(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, operation: None)
    path = run.path
    run.release()

    def resume(_: int) -> RunFolder | None:
        with suppress(Failure):
            return RunFolder(path.parent, "fast", path)
        return None

    with ThreadPoolExecutor(12) as pool:
        (resumed,) = filter(None, pool.map(resume, range(12)))
    resumed.release()


def test_on_a_file_system_with_locks_per_machine_a_run_is_refused_on_other_machines(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, operation: None)
    monkeypatch.setattr(socket, "gethostname", lambda: "node-7")
    path = run.path
    monkeypatch.setattr(socket, "gethostname", lambda: "node-8")
    before = sorted(path.iterdir())
    with pytest.raises(Failure, match=rf"process {os.getpid()} on node-7 is writing {path}"):
        RunFolder(path.parent, "fast", path)
    assert sorted(path.iterdir()) == before
