"""A run folder that becomes unusable during the training."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from contract.command_line import SMALL, run_command
from stress.compare_runs import differences

from cifar_lit.training.callbacks import EpochLines

TRAINING = (*SMALL, "--epochs", "4", "--logs", "disk", "--trainer.log_every_n_steps", "1")


def test_a_training_whose_folder_disappears_ends_with_one_line_and_can_be_resumed_when_it_is_back(
    working_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_command(*TRAINING).code == 0
    Path("disk").rename("undisturbed")
    print_line = EpochLines.on_train_epoch_end

    def move_in_the_second_epoch(lines: EpochLines, trainer: Any, pl_module: Any) -> None:
        print_line(lines, trainer, pl_module)
        if trainer.current_epoch == 1:  # before its checkpoint is written
            Path("disk").rename("away")

    with monkeypatch.context() as patch:
        patch.setattr(EpochLines, "on_train_epoch_end", move_in_the_second_epoch)
        answer = run_command(*TRAINING)
    (line,) = answer.error_lines
    assert answer.code == 1
    assert line.startswith("cifar-lit: cannot write ") and "disk/small-1" in line
    assert line.endswith("put it back and use --resume. If it was deleted, start again.")
    shutil.rmtree("disk", ignore_errors=True)
    Path("away").rename("disk")
    answer = run_command("--resume", "disk/small-1")
    assert answer.code == 0, answer.err
    assert differences(Path("disk/small-1"), Path("undisturbed/small-1")) == []
