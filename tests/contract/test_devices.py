"""Training in several processes: lost ranks and invalid devices."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from .command_line import SMALL, assert_refused, run_command
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


def test_invalid_devices_are_refused_and_several_nodes_need_an_address_and_a_rank() -> None:
    for flag, value, part in (
        ("--devices", "two", "two"),
        ("--accelerator", "gpus", "Did you mean gpu?"),
        ("--rank-timeout", "0", "--rank-timeout"),
    ):
        assert_refused(run_command(*SMALL, flag, value), 2, part)
    assert_refused(run_command(*SMALL, "--nodes", "2"), 2, "--nodes 2", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")


def test_synchronised_batch_norm_is_refused_on_cpus() -> None:
    answer = run_command(*SMALL, "--devices", "2", "--accelerator", "cpu", "--trainer.sync_batchnorm", "true")
    assert_refused(answer, 2, "--trainer.sync_batchnorm true needs GPUs", "leave it out")
