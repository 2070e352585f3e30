"""Run folders that become unusable: missing, or on a full disk."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from contract.command_line import RECIPE, SMALL, Fork, run_command
from stress.compare_runs import differences

from cifar_lit.training.callbacks import EpochLines

CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x00020000  # Linux's <sched.h>
NO_SMALL_DISK = 77  # exit code if the system does not allow mounts
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
    working_folder: Path, undisturbed: Path
) -> None:
    with in_the_second_epoch(lambda: (working_folder / "disk").rename(working_folder / "away")):
        answer = run_command(*TRAINING)
    (line,) = answer.error_lines
    assert answer.code == 1
    assert line.startswith("cifar-lit: cannot write ") and "disk/small-1" in line
    assert line.endswith("put it back and use --resume. If it was deleted, start again.")
    shutil.rmtree(working_folder / "disk", ignore_errors=True)
    (working_folder / "away").rename(working_folder / "disk")
    check_resumed(working_folder / "disk/small-1", undisturbed)


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
def test_a_training_whose_disk_is_full_ends_with_one_line_and_can_be_resumed(
    working_folder: Path, undisturbed: Path
) -> None:
    disk = working_folder / "disk"
    disk.mkdir()
    answer = Fork([*TRAINING], working_folder, "disk", around=full_in_the_second_epoch(disk)).answer()
    if answer.code == NO_SMALL_DISK:
        pytest.skip("the system does not allow mounts")
    (line,) = answer.error_lines
    assert answer.code == 1
    assert line.startswith("cifar-lit: cannot write ") and "No space left on device" in line
    assert "then use --resume" in line
    shutil.copytree(working_folder / "disk-copy/small-1", working_folder / "again/small-1")
    check_resumed(working_folder / "again/small-1", undisturbed)
