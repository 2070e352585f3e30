"""Which checkpoint `--resume` goes on from: the last of the run or, where that is damaged, the one before."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cifar_lit.cli.flags import LOGS, Command
from cifar_lit.errors import UsageError
from cifar_lit.runs.run_folder import check_unfinished, display_path, find_resumable, run_of
from cifar_lit.training.checkpoint import latest_valid_checkpoint, read_checkpoint

CHOSEN = "CIFAR_LIT_RESUME"  # tells further processes of a run which checkpoint the first one chose


def resolve_resume(command: Command, first: bool) -> Path:
    """The checkpoint that a line with --resume means; nothing is read yet. first: in the run's first process.

    Raises UsageError when there is none, it lies in no run folder, or its run is finished.
    """
    chosen = None if first else os.environ.get(CHOSEN)
    checkpoint = Path(chosen) if chosen else find_resumable(Path(command.logs or LOGS), command.resume or None)
    run = run_of(checkpoint)
    if run is None:
        raise UsageError(f"{checkpoint} lies in no run folder: --resume takes a run, or a checkpoint in its checkpoints/")
    check_unfinished(run, needs_test=command.name == "train")
    return checkpoint


def validate_resume(checkpoint: Path, command: Command, first: bool) -> tuple[Path, int]:
    """The checkpoint to go on from, and its step: `checkpoint` or, if it was not named itself and is damaged, another.

    To be called when the run's lock is held: until then another process may have written there, or come to its end.
    Raises UsageError when the run is finished by now, Failure when nothing can be gone on from.
    """
    run = run_of(checkpoint)
    assert run is not None
    check_unfinished(run, needs_test=command.name == "train")
    named = bool(command.resume) and not Path(command.resume or "").expanduser().is_dir()
    if named or (not first and CHOSEN in os.environ):
        contents, damaged = read_checkpoint(checkpoint), None
    else:
        checkpoint, contents, damaged = latest_valid_checkpoint(checkpoint)
    step = int(contents["global_step"])
    if damaged and first:
        print(f"{damaged}: going on from {display_path(checkpoint)} of step {step}", file=sys.stderr)
    os.environ[CHOSEN] = str(checkpoint)
    return checkpoint, step
