"""Checkpoints that are whole or absent, and that are refused in one line when they cannot be used."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint

from cifar_lit.disk import written_whole
from cifar_lit.errors import Failure
from cifar_lit.training.containers import FalseClaim, check_container, check_contents
from cifar_lit.training.seal import broken_seal, seal

LAST, PREVIOUS, BEST = "last.ckpt", "previous.ckpt", "best.ckpt"


class Damaged(Failure):
    """A checkpoint is not as it was written, so that an earlier one may take its place."""


class WholeCheckpoints(TorchCheckpointIO):
    """Writes a checkpoint with its checksum beside its place, syncs it to disk, then renames it.

    The `last.ckpt` that is replaced stays as `previous.ckpt`, and what that was goes: a run keeps three checkpoints at most.
    Lightning's own goes through $TMPDIR and a copy, which a kill can cut short on another file system.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Writes `checkpoint` to `path`; raises Failure, with the old file intact, when the disk is full."""
        target = Path(path)
        previous = target.with_name(PREVIOUS) if target.name == LAST else None
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with written_whole(target, previous) as partial, partial.open("w+b") as file:
                torch.save(checkpoint, file)
                seal(file)
        except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
            reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
            raise Failure(f"cannot write {target}: {reason}. Free some space; what was saved before is intact.") from error

    def load_checkpoint(self, path: Any, map_location: Callable | None = None, weights_only: bool | None = None) -> Any:
        """Reads plain values and tensors only; raises Failure for a file that is damaged or would execute code."""
        return read_checkpoint(Path(path))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The contents of a checkpoint, on the CPU; no code in it is executed.

    Raises Damaged when it is cut short, or not as it was written, Failure when it is missing, no checkpoint, or would
    execute code. A checkpoint of before there were checksums is damaged only if it cannot be read.
    """
    try:
        if reason := broken_seal(path):
            raise _damaged(path, reason)
        check_container(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's about old and foreign formats: it is the contents that decide
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise Failure(f"there is no checkpoint {path}") from None
    except Failure:
        raise
    except pickle.UnpicklingError as error:
        if "GLOBAL" in str(error) or "Trying to call reduce" in str(error) or "allowlisted" in str(error):
            raise Failure(f"{path} was not loaded: it would execute code. Use checkpoints that hold weights only.") from None
        raise Damaged(f"{path} is no checkpoint, or is damaged: use another one") from None
    except FalseClaim as error:
        raise Failure(f"{path} was not loaded: {error}. Use another checkpoint.") from None
    except Exception as error:  # a damaged pickle raises whatever its garbage leads to
        raise _damaged(path, str(error).partition("\n")[0] or type(error).__name__) from None
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise Failure(f"{path} is no Lightning checkpoint: it holds no state_dict")
    try:
        check_contents(checkpoint)
    except FalseClaim as error:
        raise Failure(f"{path} was not loaded: {error}. Use another checkpoint.") from None
    return checkpoint


def _damaged(path: Path, reason: str) -> Damaged:
    return Damaged(f"{path} is cut short or damaged ({reason}): use another checkpoint")


class Newest(NamedTuple):
    """The checkpoint that a run goes on from. damaged: the newer one that it stands in for, and what is wrong with that."""

    path: Path
    contents: dict[str, Any]
    damaged: str | None


def newest_whole(path: Path) -> Newest:
    """The checkpoint `path` of a run or, where it is damaged, the furthest whole one of those beside it.

    Raises what `read_checkpoint` does, about `path`, when none of them is whole. One that would execute code is not
    passed over: its folder is not to be trusted.
    """
    try:
        return Newest(path, read_checkpoint(path), None)
    except Damaged as error:
        others = []
        for other in (path.with_name(name) for name in (PREVIOUS, BEST, LAST)):
            with suppress(Damaged):
                if other != path and other.is_file():
                    others.append((other, read_checkpoint(other)))
        if not others:
            raise
        found, contents = max(others, key=lambda each: each[1].get("global_step", 0))
        return Newest(found, contents, str(error).rpartition(": ")[0])


class RunCheckpoint(ModelCheckpoint):
    """A ModelCheckpoint that still knows its best checkpoint after its run folder was moved."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state with every path in today's folder."""
        here = str(self.dirpath)

        def moved(path: str) -> str:
            return f"{here}/{Path(path).name}" if path else path

        paths = {name: moved(state_dict[name]) for name in ("best_model_path", "kth_best_model_path", "last_model_path")}
        best = {moved(path): score for path, score in state_dict["best_k_models"].items()}
        super().load_state_dict({**state_dict, **paths, "best_k_models": best, "dirpath": here})
        self.current_score = state_dict.get("current_score")  # which Lightning saves, and leaves out here


def best_checkpoint() -> ModelCheckpoint:
    """Keeps the checkpoint of the epoch with the highest validation accuracy as `best.ckpt`."""
    return RunCheckpoint(filename="best", monitor="val/accuracy", mode="max", save_top_k=1, enable_version_counter=False)


def last_checkpoint() -> ModelCheckpoint:
    """Keeps the checkpoint of the last epoch that ended as `last.ckpt`."""
    return RunCheckpoint(filename="last", every_n_epochs=1, save_on_train_epoch_end=True, enable_version_counter=False)
