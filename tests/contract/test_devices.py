"""Training in several processes; invalid devices are in test_errors.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from .command_line import SMALL
from .conftest import fork_pair, wait_for


def test_a_rank_without_heartbeat_ends_the_run_and_the_error_names_it_and_how_to_resume(working_folder: Path) -> None:
    words = [*SMALL, "--rank-timeout", "5", "--checkpoint-every", "20", "--epochs", "100000"]
    first, second = fork_pair(words, working_folder)
    wait_for(working_folder / "lightning_logs/small-1/checkpoints/last.ckpt", first)
    os.kill(second.pid, signal.SIGSTOP)
    answer = first.answer()
    assert answer.code == 1, answer.err
    assert "Traceback" not in answer.err
    assert "rank 1" in answer.err
    assert "--resume" in answer.err
    assert second.answer().code == -signal.SIGKILL  # no process is left
