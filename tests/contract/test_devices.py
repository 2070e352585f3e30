"""Several processes: one result, the global batch, and what happens when one of them is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from .command_line import RECIPE, SMALL, Training, assert_refused, files_of, metrics_of, rows_of, run_command
from .conftest import fork_pair, wait_for


def test_two_processes_make_one_run_of_the_global_batch_and_print_once(pair: Training) -> None:
    assert (pair.answer.code, pair.answer.err) == (0, "")
    assert [path.name for path in pair.run_dir.parent.iterdir()] == ["small-1"]
    assert sum(line.startswith("test accuracy 0.") for line in pair.answer.lines) == 1
    assert pair.answer.lines.count("run lightning_logs/small-1") == 1
    assert "32 = 2 × 16" in pair.answer.out


def test_two_processes_leave_the_files_and_the_results_of_one_and_count_every_image_once(pair: Training, run_dir: Path) -> None:
    assert {name for name in files_of(pair.run_dir) if not name.startswith(".")} == files_of(run_dir)
    two, one = metrics_of(pair.run_dir), metrics_of(run_dir)
    assert (two["devices"], two["batch_size"], two["parameters"]) == (2, 32, one["parameters"])
    assert two["test"]["images"] == 40
    assert [int(row["index"]) for row in rows_of(pair.run_dir / "predictions.csv")] == list(range(40))
    assert two["test"]["loss"] == pytest.approx(one["test"]["loss"], abs=1e-3)
    assert two["val"]["loss"] == pytest.approx(one["val"]["loss"], abs=1e-3)


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


# ---- what this machine does not have


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("words", [["--accelerator", "gpu"], ["--devices", "0,1"], ["--devices", "[1]"], ["--devices", "-1"]])
def test_without_a_gpu_what_needs_one_is_refused_with_what_the_machine_has(words: list[str]) -> None:
    if "--accelerator" not in words:
        Path("small.yaml").write_text(RECIPE.replace("accelerator: cpu", "accelerator: auto"))
    assert_refused(run_command(*SMALL, *words), 2, " ".join(words[:1]), "no GPU", "CPU")
    assert not Path("lightning_logs").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--devices", "0"], "auto"),
        (["--devices", "two"], "two"),
        (["--accelerator", "gpus"], "Did you mean gpu?"),
        (["--rank-timeout", "0"], "--rank-timeout"),
    ],
)
def test_devices_that_mean_nothing_are_refused(words: list[str], part: str) -> None:
    assert_refused(run_command(*SMALL, *words), 2, part)


def test_several_machines_need_an_address_and_a_number_each() -> None:
    assert_refused(run_command(*SMALL, "--nodes", "2"), 2, "--nodes 2", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")


@pytest.mark.parametrize(
    ("words", "world", "parts"),
    [
        (["--devices", "3"], ("2", "2"), ["--devices 3", "torchrun", "2"]),
        (["--nodes", "1"], ("2", "4"), ["--nodes 1", "torchrun", "2"]),
    ],
)
def test_flags_that_contradict_torchrun_are_refused(words: list[str], world: tuple[str, str], parts: list[str]) -> None:
    local, everywhere = world
    answer = run_command(
        *SMALL, *words, TORCHELASTIC_RUN_ID="x", RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE=local, WORLD_SIZE=everywhere
    )
    assert_refused(answer, 2, *parts)
