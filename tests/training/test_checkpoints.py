"""Checkpoint files are complete or absent, and read exactly or refused. Hostile files are in tests/security."""

import os
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cifar_lit.base.errors import Failure, UsageError
from cifar_lit.training.checkpoint import (
    AtomicCheckpointIO,
    DamagedCheckpoint,
    latest_valid_checkpoint,
    read_checkpoint,
)

FULL_DISK = Path("/dev/full")  # Linux: every write fails as on a full disk
CONTENT: dict[str, Any] = {
    "state_dict": OrderedDict(weight=torch.arange(300.0), bias=torch.ones(3, dtype=torch.bfloat16)),
    "epoch": 3,
    "hyper_parameters": {"lr": 0.1, "name": "x", "input_shape": [3, 4, 4]},
    "callbacks": {  # types that a user's callback may save
        "own": {
            "kinds": (torch.float32, torch.device("cuda:1"), None, 0.5),
            "counts": Counter("aab"),
        },
        "part": torch.arange(24.0).view(4, 6)[1:, ::2],
    },
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoints" / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(CONTENT, path)
    return path


def equal(one: Any, other: Any) -> bool:
    """Return whether two nested values are equal, with bit-equal tensors."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping):
        same_names = isinstance(other, Mapping) and list(one) == list(other)
        return same_names and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other


def refusal(path: Path) -> str:
    """Return the one-line message with which a file is refused."""
    with pytest.raises((Failure, UsageError)) as refused:
        read_checkpoint(path)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_checkpoints_are_interchangeable_with_torchs_own(checkpoint: Path) -> None:
    assert equal(AtomicCheckpointIO().load_checkpoint(checkpoint), CONTENT)
    assert equal(torch.load(checkpoint, weights_only=True, mmap=True), CONTENT)
    assert [file.name for file in checkpoint.parent.iterdir()] == ["last.ckpt"]
    for as_zip in (True, False):
        torch.save(CONTENT, checkpoint, _use_new_zipfile_serialization=as_zip)
        assert equal(read_checkpoint(checkpoint), CONTENT)


@pytest.mark.skipif(not FULL_DISK.exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("saved", [True, False])
def test_a_full_disk_is_named_and_resume_is_advised_only_if_a_checkpoint_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    checkpoint, save = tmp_path / "last.ckpt", torch.save
    if saved:
        AtomicCheckpointIO().save_checkpoint(CONTENT, checkpoint)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def save_to_full_disk(content: Any, file: Any) -> None:
        with FULL_DISK.open("wb", buffering=0) as full:
            save(content, full)

    monkeypatch.setattr(torch, "save", save_to_full_disk)
    with pytest.raises(Failure) as failure:
        AtomicCheckpointIO().save_checkpoint({**CONTENT, "large": torch.zeros(100_000)}, checkpoint)
    line = str(failure.value)
    assert line.startswith(f"cannot write {checkpoint}: No space left on device. ")
    assert line.endswith("free some space, then use --resume." if saved else "free some space, then start again.")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


# ---- damage


def test_the_latest_intact_checkpoint_replaces_a_damaged_last_one(tmp_path: Path) -> None:
    for previous, best in ((20, 30), (30, 20)):
        for name, step in (("last", 40), ("previous", previous), ("best", best)):
            AtomicCheckpointIO().save_checkpoint({**CONTENT, "global_step": step}, tmp_path / f"{name}.ckpt")
        os.truncate(tmp_path / "last.ckpt", 1000)
        assert latest_valid_checkpoint(tmp_path / "last.ckpt").contents["global_step"] == 30


def test_a_flipped_bit_of_the_weights_is_found(checkpoint: Path) -> None:
    content = bytearray(checkpoint.read_bytes())
    content[content.index(torch.arange(300.0).numpy().tobytes()) + 600] ^= 1
    checkpoint.write_bytes(bytes(content))
    with pytest.raises(DamagedCheckpoint, match="its checksum does not match"):
        read_checkpoint(checkpoint)


def test_a_file_of_another_type_is_refused_without_a_warning_about_code(tmp_path: Path) -> None:
    path = tmp_path / "other"
    assert "there is no checkpoint" in refusal(path)
    for content, line in ((b"hello, world\n" * 50, "damaged"), (b"", "damaged")):
        path.write_bytes(content)
        assert line in refusal(path) and "execute code" not in refusal(path)
    torch.save({"weight": torch.zeros(2)}, path)
    assert "not a Lightning checkpoint" in refusal(path)
    torch.save([torch.zeros(2)], path)
    assert "holds a list" in refusal(path)


def test_a_run_folder_or_model_file_is_refused_with_the_checkpoint_to_use(checkpoint: Path) -> None:
    run, best = checkpoint.parent.parent, checkpoint.with_name("best.ckpt")
    (run / "model.safetensors").touch()
    for place, kind in ((run, "a folder"), (run / "model.safetensors", "no checkpoint, but holds weights only")):
        with pytest.raises(UsageError, match=f"{place} is {kind}: name a checkpoint of a run"):
            read_checkpoint(place)
    checkpoint.rename(best)
    for place in (run, run / "model.safetensors"):
        with pytest.raises(UsageError, match=f"name a checkpoint, {best}"):
            read_checkpoint(place)
