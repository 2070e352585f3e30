"""When something is wrong: one line on stderr, exit code 2 for what was typed and 1 for what failed, nothing damaged."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from .command_line import SMALL, Fork, assert_refused, checkpoint_of, contents_of, copy_run, run_command

S = "--recipe small.yaml"
TYPED: list[tuple[str, list[str]]] = [
    # the nearest right name
    (f"{S} --trainer.max_epoch 3", ["--trainer.max_epoch", "Did you mean --trainer.max_epochs?"]),
    (f"{S} --data.shufle=true", ["--data.shufle", "Did you mean --data.shuffle?"]),
    (f"{S} --batchsize 3", ["--batchsize", "Did you mean --batch-size?"]),
    (f"{S} --qqq", ["no flag --qqq"]),
    ("--recipe quikstart", ["'quikstart'", "Did you mean quickstart?"]),
    ("--recipe nowhere.yaml", ["nowhere.yaml"]),
    ("recipes quikstart", ["'quikstart'", "Did you mean quickstart?"]),
    (f"{S} --net resnt18", ["'resnt18'", "Did you mean resnet18?"]),
    (f"{S} --dataset cifar1O", ["'cifar1O'", "Did you mean cifar10?", "fashion_mnist"]),
    (f"{S} --config key.yaml", ["trainer.max_epoch", "Did you mean trainer.max_epochs?"]),
    (f"{S} --config top.yaml", ["trainr", "Did you mean trainer"]),
    (f"{S} --model.optimizer adam", ["model.optimizer", "'adam'", "Did you mean adamw?"]),
    (f"{S} --precision bf17-mixed", ["--precision", "bf17-mixed", "Did you mean bf16-mixed?"]),
    (f"{S} --model.schedule cosin", ["model.schedule", "constant, cosine", "'cosin'", "Did you mean cosine?"]),
    (f"{S} --model.class_weights balancd", ["model.class_weights must be one of none, balanced", "Did you mean balanced?"]),
    (f"{S} --data.sampling balancing", ["data.sampling must be one of none, balanced", "Did you mean balanced?"]),
    (f"{S} --model.monitor macro-f1", ["must be one of accuracy, loss, balanced_accuracy, macro_f1", "Did you mean macro_f1?"]),
    (f"{S} --model.tta mirrored", ["model.tta must be one of none, mirror, full", "'mirrored'", "Did you mean mirror?"]),
    (f"{S} --trainer.deterministic wran", ["trainer.deterministic must be one of true, false, warn", "Did you mean warn?"]),
    (f"{S} --trainer.callbacks EarlyStoping", ["trainer.callbacks: no class is called EarlyStoping"]),
    (f"{S} --trainer.callbacks EarlyStopping --trainer.callbacks.mod=x", ["trainer.callbacks: EarlyStopping has no setting mod"]),
    ("recipes --all", ["no flag --all", "cifar-lit recipes NAME"]),
    ("devices --net lenett", ["'lenett'", "Did you mean lenet?"]),
    ("devices --nte lenet", ["no flag --nte", "Did you mean --net?"]),
    # abbreviations
    (f"{S} --epoch 3", ["no flag --epoch", "Did you mean --epochs?"]),
    (f"{S} --trainer.max_epo 3", ["no flag --trainer.max_epo", "Did you mean --trainer.max_epochs?"]),
    (f"{S} --acc cpu", ["no flag --acc"]),
    # values
    (f"{S} --epochs", ["--epochs needs a value"]),
    (f"{S} --lr --seed 3", ["--lr needs a value"]),
    (f"{S} --model.lr", ["--model.lr needs a value"]),
    (f"{S} stray", ["'stray'"]),
    (f"{S} --epochs many", ["--epochs", "whole number", "many"]),
    (f"{S} --epochs 0", ["--epochs", "at least 1"]),
    (f"{S} --lr fast", ["--lr (model.lr) must be a number, not fast"]),
    (f"{S} --data.shuffle 3", ["data.shuffle must be true or false, not 3"]),
    (f"{S} --lr 0", ["learning rate", "above 0", "--lr"]),
    (f"{S} --lr nan", ["--lr", "nan"]),
    (f"{S} --batch-size 0", ["--batch-size", "at least 1"]),
    (f"{S} --batch-size 1.5", ["--batch-size", "whole number", "1.5"]),
    (f"{S} --data.eval_batch_size 0", ["data.eval_batch_size must be at least 1"]),
    (f"{S} --data.count 3", ["data.count must be at least 10 images"]),
    (f"{S} --model.width 0", ["width", "above 0"]),
    (f"{S} --data.crop 16", ["data.crop 16", "16×16"]),
    (f"{S} --data.augment.brightnes 0.4", ["data.augment has no setting 'brightnes'", "Did you mean brightness?"]),
    (f"{S} --data.augment.hue=0.7", ["data.augment.hue must be a number from 0 to 0.5, not 0.7"]),
    (f"{S} --data.augment 3", ["data.augment must be settings by name, not 3"]),
    (f"{S} --data.augment.blur 9", ["data.augment.blur 9", "16×16"]),
    ("preview", ["preview what?"]),
    ("preview nowhere.png", ["nowhere.png"]),
    (f"{S} --data.image_size 8", ["lenet", "8×8", "16×16"]),
    (f"{S} --data.image_size 8x40", ["lenet", "8×40", "16×16"]),
    (f"{S} --data.image_size 96x", ["data.image_size must be a number of pixels for squares, or height x width", "not '96x'"]),
    (f"{S} --data.image_size 96x128x3", ["such as 96x128, not '96x128x3'"]),
    (f"{S} --data.image_size [96,128,3]", ["such as 96x128, not '[96, 128, 3]'"]),
    (f"{S} --data.image_size 0x10", ["from 1 to 2,048 pixels a side, not 0×10"]),
    (f"{S} --data.image_size 0", ["from 1 to 2,048 pixels a side, not 0×0"]),
    (f"{S} --data.image_size 96x2049", ["2,048", "96×2049"]),
    (f"{S} --data.resize letterbx", ["data.resize must be one of crop, letterbox, squash", "Did you mean letterbox?"]),
    (f"{S} --data.resize squash", ["shapes are drawn in the size", "leave data.resize out"]),
    (f"{S} --model.num_classes 3", ["model.num_classes", "leave it out"]),
    (f"{S} --data.seed 3", ["data.seed follows from --seed: leave it out"]),
    (f"{S} --model.monitor loss --data.val_size 0", ["model.monitor loss", "set --data.val_size 0.1"]),
    (f"{S} --data.sampling balanced --data.shuffle false", ["data.sampling balanced", "leave data.shuffle at true"]),
    (f"{S} --data.sampling balanced --model.class_weights effective", ["unequal classes twice: set one of them to none"]),
    # strategies
    (f"{S} --devices 2 --trainer.strategy ddp_fork", ["--trainer.strategy ddp_fork", "use ddp"]),
    (f"{S} --trainer.strategy=fsdp_cpu_offload", ["--trainer.strategy fsdp", "use --trainer.strategy ddp"]),
    (f"{S} --trainer.strategy ModelParallelStrategy", ["--trainer.strategy ModelParallel", "use --trainer.strategy ddp"]),
    (f"{S} --config fsdp.yaml", ["--trainer.strategy FSDP", "use --trainer.strategy ddp"]),
    # files
    (f"{S} --config nowhere.yaml", ["no configuration file nowhere.yaml"]),
    (f"{S} --config broken.yaml", ["broken.yaml", "YAML", "line 3"]),
    (f"{S} --config text.yaml", ["text.yaml", "settings by name"]),
    ("--resume loose.ckpt", ["loose.ckpt lies in no run folder"]),
]  # fmt: skip


@pytest.fixture
def files(working_folder: Path) -> Path:
    """The configuration files that TYPED names."""
    for name, text in {
        "broken.yaml": "trainer:\n  max_epochs: [1\nmodel: {",
        "text.yaml": "hello\n",
        "key.yaml": "trainer:\n  max_epoch: 3\n",
        "top.yaml": "trainr:\n  max_epochs: 3\n",
        "fsdp.yaml": "trainer: {strategy: {class_path: lightning.pytorch.strategies.FSDPStrategy}}",
        "loose.ckpt": "",
    }.items():
        (working_folder / name).write_text(text)
    return working_folder


@pytest.mark.parametrize(("line", "parts"), TYPED, ids=[line.replace(S, "…") for line, _ in TYPED])
def test_what_cannot_be_meant_is_answered_in_one_line_with_2_and_makes_no_run(files: Path, line: str, parts: list[str]) -> None:
    assert_refused(run_command(*line.split()), 2, *parts)
    assert not (files / "lightning_logs").exists()


def test_a_side_that_the_net_cannot_take_is_refused_before_anything_is_trained(files: Path) -> None:
    words = ("--net", "alexnet", "--data.image_size", "64", "--data.resolutions", "{32: 0.5}")
    assert_refused(run_command(*S.split(), *words), 2, "alexnet cannot take 32×32 images; the least size is 63×63")
    assert not (files / "lightning_logs").exists()


# ---- checkpoints


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "cut short": cut_short,
    "emptied": lambda path: path.write_bytes(b""),
    "text instead": lambda path: path.write_text("no checkpoint at all\n"),
    "without weights": lambda path: torch.save({"epoch": 3}, path),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_checkpoint_that_is_damaged_is_named_and_left(run_dir: Path, damage: Callable[[Path], Any]) -> None:
    shutil.copytree(run_dir, "copy")
    checkpoint = Path("copy/checkpoints/best.ckpt")
    damage(checkpoint)
    before = contents_of(Path("copy"))
    for command in ("test", "validate", "predict"):
        assert_refused(run_command(command, "--ckpt_path", checkpoint), 1, str(checkpoint))
    assert contents_of(Path("copy")) == before
    assert not Path("lightning_logs").exists()


def test_a_checkpoint_of_another_net_is_told_with_both(run_dir: Path) -> None:
    checkpoint = run_dir / "checkpoints/best.ckpt"
    for flags, other in (
        (["--net", "tudui"], "not of tudui (3×16×16, 4 classes)"),
        (["--data.num_classes", "5"], "not of lenet (3×16×16, 5 classes)"),
        (["--data.image_size", "20"], "not of lenet (3×20×20, 4 classes)"),
        (["--model.width", "2"], "not of lenet width 2 (3×16×16, 4 classes)"),
    ):
        answer = run_command("test", "--ckpt_path", checkpoint, *flags)
        assert_refused(answer, 1, f"{checkpoint} holds weights of lenet (3×16×16, 4 classes)", other)
    assert not Path("lightning_logs").exists()


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_checkpoint_that_would_execute_code_is_refused_and_nothing_runs(
    run_dir: Path, working_folder: Path, zipped: bool
) -> None:
    shutil.copytree(run_dir, "copy")
    checkpoint = Path("copy/checkpoints/best.ckpt")
    contents = {**checkpoint_of(checkpoint), "hyper_parameters": Payload(working_folder / "ran")}
    torch.save(contents, checkpoint, _use_new_zipfile_serialization=zipped)
    for command in ("test", "predict"):
        assert_refused(run_command(command, "--ckpt_path", checkpoint), 1, str(checkpoint), "execute code")
    assert not (working_folder / "ran").exists()
    torch.load(checkpoint, weights_only=False)
    assert (working_folder / "ran").exists(), "the payload is harmless, so that nothing was tested"


def test_a_damaged_model_file_is_named(run_dir: Path) -> None:
    shutil.copytree(run_dir, "copy")
    cut_short(Path("copy/model.safetensors"))
    assert_refused(run_command("classify", "copy", "cat.png"), 1, "model.safetensors")


# ---- trainings that fail


def test_a_loss_that_is_not_finite_stops_at_that_step_and_keeps_the_last_good_checkpoint() -> None:
    answer = run_command(*SMALL, "--lr", "1e30")
    (line,) = answer.error_lines
    assert answer.code == 1
    assert re.match("cifar-lit: the loss is nan .*step.*checkpoint.* lower --lr", line, re.IGNORECASE), line
    assert "test accuracy" not in answer.out
    run_dir = Path("lightning_logs/small-1")
    assert not (run_dir / "metrics.json").exists()
    for path in run_dir.rglob("*.ckpt"):
        assert all(tensor.isfinite().all() for tensor in checkpoint_of(path)["state_dict"].values() if tensor.is_floating_point())


def test_a_resumed_run_whose_loss_is_not_finite_keeps_the_checkpoint_that_it_had(interruption: Any) -> None:
    last = copy_run(interruption.run_dir) / "checkpoints/last.ckpt"
    before = last.read_bytes()
    answer = run_command("--resume", "--lr", "1e30")
    assert answer.code == 1
    assert "the loss is" in answer.error_lines[-1]
    assert last.read_bytes() == before


def test_a_folder_for_runs_that_cannot_be_made_is_told() -> None:
    assert_refused(run_command(*SMALL, "--logs", "small.yaml/runs"), 1, "small.yaml/runs", "--logs")


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[None]:
    """An empty file system of that size at `folder`, which this process alone sees; copied to a folder beside it at the end."""
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


CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x00020000  # of Linux's <sched.h>
NO_SMALL_DISK = 77  # the exit code where the system lets no file system be mounted


@pytest.mark.skipif(sys.platform != "linux", reason="Linux mounts a small file system for one process")
def test_a_full_disk_is_told_in_a_line_and_what_was_saved_before_is_intact(run_dir: Path, working_folder: Path) -> None:
    disk = working_folder / "disk"
    disk.mkdir()
    checkpoint = (run_dir / "checkpoints/last.ckpt").stat().st_size
    room = 5 * checkpoint // 2 // 1024  # for two of them and the curves, but not for a third
    answer = Fork([*SMALL, "--logs", "disk"], working_folder, "full", around=small_disk(disk, room)).answer()
    if answer.code == NO_SMALL_DISK:
        pytest.skip("the system lets no small file system be mounted")
    assert answer.code == 1
    (line,) = answer.error_lines
    assert line.startswith("cifar-lit: ")
    assert "space" in line
    left = working_folder / "disk-copy/small-1"
    assert checkpoint_of(left / "checkpoints/last.ckpt")["global_step"] > 0
    assert not [path for path in left.rglob("*") if path.name.endswith((".part", ".tmp"))]
