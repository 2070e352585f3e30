"""Several processes: what happens when one of them is lost, and devices that cannot be meant."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from .command_line import SMALL, assert_refused, run_command
from .conftest import fork_pair, wait_for


def test_a_rank_that_gives_no_sign_ends_the_run_and_the_line_names_it_and_how_to_go_on(working_folder: Path) -> None:
    words = [*SMALL, "--rank-timeout", "5", "--checkpoint-every", "20", "--epochs", "100000"]
    first, second = fork_pair(words, working_folder)
    wait_for(working_folder / "lightning_logs/small-1/checkpoints/last.ckpt", first)
    os.kill(second.pid, signal.SIGSTOP)
    answer = first.answer()
    assert answer.code == 1, answer.err
    assert "Traceback" not in answer.err
    assert "rank 1" in answer.err
    assert "--resume" in answer.err
    assert second.answer().code == -signal.SIGKILL  # nothing is left of the run


def test_devices_that_mean_nothing_are_refused_and_several_machines_need_an_address_and_a_number_each() -> None:
    for flag, value, part in (
        ("--devices", "two", "two"),
        ("--accelerator", "gpus", "Did you mean gpu?"),
        ("--rank-timeout", "0", "--rank-timeout"),
    ):
        assert_refused(run_command(*SMALL, flag, value), 2, part)
    assert_refused(run_command(*SMALL, "--nodes", "2"), 2, "--nodes 2", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")


def test_synchronised_batch_norm_is_refused_on_cpus_where_torch_has_none() -> None:
    answer = run_command(*SMALL, "--devices", "2", "--accelerator", "cpu", "--trainer.sync_batchnorm", "true")
    assert_refused(answer, 2, "--trainer.sync_batchnorm true needs GPUs", "leave it out")
