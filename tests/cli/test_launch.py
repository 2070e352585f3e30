"""Commands started by torchrun or SLURM, and jobs restarted by a scheduler."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from contract.command_line import SMALL, metrics_of, run_command

from cifar_lit.base.errors import UsageError
from cifar_lit.cli.flags import Command, parse
from cifar_lit.cli.launch import apply_launcher, continue_job, is_first_process, job_of

SLURM = {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "hill"}
AGAIN = {**SLURM, "SLURM_RESTART_COUNT": "1"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
TORCHRUN_AGAIN = {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}
ARRAY = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}
LINE = ["--recipe", "small.yaml", "--lr", "0.1"]
# Variables of a task started by srun on two nodes with two tasks each.
STEP = {
    **{"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "night", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"},
    **{"SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"},
}
WITHOUT_SRUN = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}
ONE_TASK = {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_NODES": "1"}
RESTARTS = {**TORCHRUN, "TORCHELASTIC_MAX_RESTARTS": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}


# ---- devices and nodes


@pytest.mark.parametrize(
    ("words", "changes", "devices", "nodes"),
    [
        *((words, {}, "2", "2") for words in ([], ["--devices", "2"], ["--devices", "auto"], ["--nodes", "2"])),
        ([], ONE_TASK, "1", "1"),  # srun -n 1 within the job: the step counts
    ],
)
def test_devices_come_from_the_slurm_step(words: list[str], changes: dict[str, str], devices: str, nodes: str) -> None:
    command, environment = parse("fit", words), {**STEP, **changes}
    apply_launcher(command, environment)
    assert (command.value("trainer.devices"), command.value("trainer.num_nodes")) == (devices, nodes)
    # Lightning compares these variables with the Trainer's arguments.
    assert (environment["SLURM_NTASKS_PER_NODE"], environment["SLURM_NNODES"]) == (devices, nodes)
    assert (environment["RANK"], environment["LOCAL_RANK"]) == ("3", "1")
    assert not is_first_process(environment)


def test_devices_come_from_torchrun() -> None:
    command = parse("fit", [])
    apply_launcher(command, {**TORCHRUN, "WORLD_SIZE": "4"})
    assert (command.value("trainer.devices"), command.value("trainer.num_nodes")) == ("2", "2")
    assert not is_first_process({**TORCHRUN, "RANK": "2"})  # the first process of the second node


@pytest.mark.parametrize(
    ("argv", "environment", "text"),
    [
        ("--devices 0,1,2", STEP, "--devices 0,1,2 contradicts the launcher, which started 2: leave --devices out"),
        ("--nodes 2", TORCHRUN, "--nodes 2 contradicts the launcher, which started 1"),
        ("", WITHOUT_SRUN, "only one of the 4 tasks of this SLURM job runs: put srun before the command"),
        ("", RESTARTS, "needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
    ],
)
def test_flags_that_contradict_the_launcher_are_refused(argv: str, environment: dict[str, str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        apply_launcher(parse("fit", argv.split()), dict(environment))


@pytest.mark.parametrize("environment", [{}, {"SLURM_JOB_ID": "7"}, {**STEP, "SLURM_JOB_NAME": "interactive"}])
def test_flags_stay_without_srun_and_in_interactive_shells(environment: dict[str, str]) -> None:
    command, before = parse("fit", ["--devices", "3"]), dict(environment)
    apply_launcher(command, environment)
    assert command.flags == ["--trainer.devices=3"] and environment == before


# ---- restarted jobs


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({}, ""),
        (SLURM, "hill:7"),
        ({**AGAIN, **ARRAY}, "hill:5_2"),
        (TORCHRUN, f"torchrun:{os.getppid()}"),
        ({**TORCHRUN_AGAIN, "TORCHELASTIC_RUN_ID": "x"}, "torchrun:x"),
        ({**TORCHRUN_AGAIN, **SLURM}, "hill:7"),
        ({**SLURM, "CIFAR_LIT_JOB": "mine"}, "mine"),
    ],
)
def test_a_job_is_identified_by_its_name_or_number(environment: dict[str, str], job: str) -> None:
    assert job_of(environment) == job


def start_command(words: list[str], environment: dict[str, str]) -> Command:
    command = parse("train", words)
    continue_job(command, words, environment)
    return command


def write_run(command: Command, name: str, checkpoint: bool = True) -> Path:
    """Create the run folder that this command would have left."""
    run = Path("lightning_logs", name)
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("{}")
    assert command.job is not None
    (run / ".job").write_text(command.job)
    if checkpoint:
        (run / "checkpoints/last.ckpt").touch()
    return run


def test_a_restarted_job_resumes_its_newest_run(capsys: pytest.CaptureFixture[str]) -> None:
    first = start_command(LINE, SLURM)
    assert first.resume is None and start_command(LINE, {}) == parse("train", LINE)
    write_run(first, "small-3", checkpoint=False)
    command = start_command(LINE, AGAIN)
    assert (command.resume, command.recipe) == (None, "small.yaml")
    line = "job hill:7 has no checkpoint in lightning_logs yet: starting a new run\n"
    assert capsys.readouterr().err == line
    older, newer = write_run(first, "small-1"), write_run(first, "small-2")
    os.utime(older / "config.yaml", (1, 1))
    write_run(start_command(LINE, {**SLURM, "SLURM_JOB_ID": "8"}), "small-4")
    command = start_command(LINE, AGAIN)
    assert (command.resume, command.recipe, command.logs) == (str(newer), None, "lightning_logs")
    assert command.flags == ["--model.lr=0.1"]  # flags override the settings of the run
    assert capsys.readouterr().err == "resuming lightning_logs/small-2 of job hill:7\n"
    assert start_command(LINE, SLURM).resume is None  # the same command again, in a job that was not restarted
    words = ["--resume", str(older)]
    assert start_command(words, AGAIN) == parse("train", words)


def test_each_training_of_a_restarted_script_resumes_its_own_run(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = [*LINE, "--seed", "1"], [*LINE, "--seed", "2"]
    finished = write_run(start_command(first, SLURM), "small-1")
    (finished / "metrics.json").write_text('{"test": {"accuracy": 1}}')
    run = write_run(start_command(second, SLURM), "small-2")
    with pytest.raises(SystemExit) as ended:
        start_command(first, AGAIN)
    assert ended.value.code == 0
    assert "lightning_logs/small-1 of job hill:7 is finished" in capsys.readouterr().err
    assert start_command(second, AGAIN).resume == str(run)
    assert start_command([*LINE, "--seed", "3"], AGAIN).resume is None


def test_every_process_resumes_the_same_run_and_only_rank_0_reports_it(capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(start_command(LINE, TORCHRUN), "small-1")
    assert start_command(LINE, {**TORCHRUN_AGAIN, "RANK": "1", "LOCAL_RANK": "1"}).resume == str(run)
    assert capsys.readouterr().err == ""
    assert start_command(LINE, TORCHRUN_AGAIN).resume == str(run)
    assert capsys.readouterr().err.startswith("resuming lightning_logs/small-1")


def test_a_named_job_starts_resumes_and_ends_in_one_run_folder(run_dir: Path) -> None:
    first = run_command(*SMALL, CIFAR_LIT_JOB="mine")
    assert first.code == 0, first.err
    own = Path("lightning_logs/small-1")
    (own / "metrics.json").unlink()
    again = run_command(*SMALL, CIFAR_LIT_JOB="mine")
    assert (again.code, again.err) == (0, "resuming lightning_logs/small-1 of job mine\n")
    assert metrics_of(own)["test"] == metrics_of(run_dir)["test"]
    assert run_command(*SMALL, CIFAR_LIT_JOB="mine").code == 0
    assert [path.name for path in Path("lightning_logs").iterdir()] == ["small-1"]
