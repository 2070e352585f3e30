"""Several processes: one result, the global batch, and what happens when one of them is lost."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from .command_line import RECIPE, SCRIPTS, SMALL, Process, assert_refused, files_of, metrics_of, rows_of, run_command
from .conftest import Training, wait_for


def test_two_processes_make_one_run_and_print_once(pair: Training) -> None:
    assert (pair.answer.code, pair.answer.err) == (0, "")
    assert [path.name for path in pair.run_dir.parent.iterdir()] == ["small-1"]
    assert sum(line.startswith("test accuracy 0.") for line in pair.answer.lines) == 1
    assert pair.answer.lines.count("run lightning_logs/small-1") == 1


def test_the_batch_size_is_the_global_one_and_each_device_takes_half(pair: Training) -> None:
    assert "32 = 2 × 16" in pair.answer.out
    assert metrics_of(pair.run_dir)["batch_size"] == 32


def test_devices_is_the_number_of_processes_and_every_image_is_counted_once(pair: Training) -> None:
    metrics = metrics_of(pair.run_dir)
    assert metrics["devices"] == 2
    assert metrics["test"]["images"] == 40
    assert [int(row["index"]) for row in rows_of(pair.run_dir / "predictions.csv")] == list(range(40))


def test_two_processes_leave_the_files_and_the_results_of_one(pair: Training, run_dir: Path) -> None:
    assert {name for name in files_of(pair.run_dir) if not name.startswith(".")} == files_of(run_dir)
    two, one = metrics_of(pair.run_dir), metrics_of(run_dir)
    assert two["parameters"] == one["parameters"]
    assert two["test"]["loss"] == pytest.approx(one["test"]["loss"], abs=1e-3)
    assert two["val"]["loss"] == pytest.approx(one["val"]["loss"], abs=1e-3)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are found in Linux's /proc")
def test_a_rank_that_gives_no_sign_ends_the_run_and_the_line_names_it_and_how_to_go_on(working_folder: Path) -> None:
    words = [sys.executable, SCRIPTS / "train.py", *SMALL, "--devices", "2", "--rank-timeout", "6", "--checkpoint-every", "20"]
    process = Process([*words, "--epochs", "100000"], working_folder)
    frozen: list[int] = []
    try:
        wait_for(working_folder / "lightning_logs/small-1/checkpoints/last.ckpt", process)
        for pid in process.children():
            if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                frozen.append(pid)
                os.kill(pid, signal.SIGSTOP)
        assert len(frozen) == 1
        answer = process.answer()
    finally:
        process.kill()
    assert answer.code == 1, answer.err
    assert "32 = 2 × 16" in answer.out
    assert "Traceback" not in answer.err
    assert "rank 1" in answer.err
    assert "--resume" in answer.err
    for pid in frozen:
        assert not is_alive(pid)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


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
