"""Training in several processes; invalid devices are in test_errors.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from .command_line import SMALL
from .conftest import fork_pair, wait_for


def test_a_killed_rank_ends_the_run_and_the_error_says_how_to_resume(working_folder: Path) -> None:
    words = [*SMALL, "--checkpoint-every", "20", "--epochs", "100000"]
    first, second = fork_pair(words, working_folder)
    wait_for(working_folder / "lightning_logs/small-1/checkpoints/last.ckpt", first)
    os.kill(second.pid, signal.SIGKILL)
    answer = first.answer()
    assert answer.code == 1, answer.err
    assert "Traceback" not in answer.err
    assert "another process of this run ended early" in answer.err
    assert "--resume" in answer.err
