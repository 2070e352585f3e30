"""Training in several processes; invalid devices are in test_errors.py."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from .command_line import SMALL
from .conftest import start_pair, wait_for


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGKILL, "ended early"), (signal.SIGSTOP, "gave no answer within --rank-timeout")]
)
def test_a_killed_or_frozen_rank_ends_the_run_and_the_error_says_how_to_resume(
    working_folder: Path, number: int, reason: str
) -> None:
    words = ["train", *SMALL, "--rank-timeout", "10", "--checkpoint-every", "20", "--epochs", "100000"]
    first, second = start_pair(words, working_folder)
    wait_for(working_folder / "lightning_logs/small-1/checkpoints/last.ckpt", first)
    second.process.send_signal(number)
    answer = first.answer()
    second.process.kill()  # torchrun does the same
    assert answer.code == 1, answer.err
    assert "Traceback" not in answer.err
    assert f"another process of this run {reason}" in answer.err
    assert "Resume with:\n  python -m cifar_lit train --resume lightning_logs/small-1" in answer.err
