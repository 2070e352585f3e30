"""Training in several processes; invalid devices are in test_errors.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from .command_line import RECIPE, SMALL, assert_refused, run_command
from .conftest import fork_pair, wait_for


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGKILL, "ended early"), (signal.SIGSTOP, "gave no answer within --rank-timeout")]
)
def test_a_killed_or_frozen_rank_ends_the_run_and_the_error_says_how_to_resume(
    working_folder: Path, number: int, reason: str
) -> None:
    words = [*SMALL, "--rank-timeout", "10", "--checkpoint-every", "20", "--epochs", "100000"]
    first, second = fork_pair(words, working_folder)
    wait_for(working_folder / "lightning_logs/small-1/checkpoints/last.ckpt", first)
    os.kill(second.pid, number)
    answer = first.answer()
    os.kill(second.pid, signal.SIGKILL)  # torchrun does the same
    assert answer.code == 1, answer.err
    assert "Traceback" not in answer.err
    assert f"another process of this run {reason}" in answer.err
    assert "Resume with:\n  cifar-lit train --resume lightning_logs/small-1" in answer.err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--devices", "2", "--checkpoint-every", "10m"], "needs one process: use a number of steps"),
        (["--nodes", "2"], "needs MASTER_ADDR, MASTER_PORT and NODE_RANK"),
    ],
)
def test_what_several_processes_lack_is_said_before_they_start(
    working_folder: Path, words: list[str], part: str
) -> None:
    (working_folder / "small.yaml").write_text(RECIPE)
    assert_refused(run_command(*SMALL, *words), 2, part)
