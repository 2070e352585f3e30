"""Who started a run's processes, and what the command line takes from that."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import refused, typed

from cifar_lit.cli.flags import parse
from cifar_lit.distributed.launcher import advice, apply_slurm, by_slurm, is_first_process, starts_again
from cifar_lit.errors import UsageError

# Of a task that srun starts, as SLURM 22.05 sets it: two nodes with two tasks each.
STEP = {
    **{"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "night", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"},
    **{"SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NTASKS_PER_NODE": "2"},
    **{"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"},
}


@pytest.mark.parametrize("words", [[], ["--devices", "2"], ["--devices", "auto"], ["--nodes", "2"], ["--devices=-1"]])
def test_devices_and_nodes_come_from_slurm_where_the_flags_agree(words: list[str]) -> None:
    command, environment = parse("fit", words), dict(STEP)
    apply_slurm(command, environment)
    assert (command.value("trainer.devices"), command.value("trainer.num_nodes")) == ("2", "2")
    ranks = {name: environment[name] for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE")}
    assert ranks == {"RANK": "3", "LOCAL_RANK": "1", "NODE_RANK": "1", "WORLD_SIZE": "4"}
    assert not is_first_process(environment)


@pytest.mark.parametrize(
    ("changes", "devices", "nodes"),
    [
        ({"SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}, "1", "1"),  # srun -n 1 in such a job
        ({"SLURM_NTASKS": "2", "SLURM_NNODES": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, "1", "2"),
        ({"SLURM_NTASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4,4"}, "4", "2"),
    ],
)
def test_a_step_counts_and_not_its_job(changes: dict[str, str], devices: str, nodes: str) -> None:
    command, environment = parse("fit", []), {**STEP, **changes}
    apply_slurm(command, environment)
    assert (command.value("trainer.devices"), command.value("trainer.num_nodes")) == (devices, nodes)
    assert (environment["SLURM_NTASKS_PER_NODE"], environment["SLURM_NNODES"]) == (devices, nodes)  # which Lightning compares


@pytest.mark.parametrize(
    ("words", "changes", "complaint"),
    [
        (["--devices", "4"], {}, r"--devices 4 contradicts SLURM, which started 2 \(--ntasks-per-node\): leave --devices out"),
        (["--nodes", "1"], {}, r"--nodes 1 contradicts SLURM, which started 2 \(--nodes\)"),
        ([], {"SLURM_STEP_TASKS_PER_NODE": "3,1"}, "SLURM started 3,1 tasks on its nodes, .* use --ntasks-per-node"),
    ],
)
def test_what_contradicts_slurm_is_refused(words: list[str], changes: dict[str, str], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        apply_slurm(parse("fit", words), {**STEP, **changes})


def test_a_script_that_forgot_srun_is_told_so_in_place_of_waiting_for_its_other_tasks() -> None:
    alone = {name: value for name, value in STEP.items() if "STEP" not in name}
    with pytest.raises(UsageError, match="has 4 tasks, but only one of them runs: put srun before the command"):
        apply_slurm(parse("fit", []), alone)
    command = parse("fit", [])
    apply_slurm(command, {**alone, "SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_TASKS_PER_NODE": "1"})
    assert command.value("trainer.devices") == "1"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_JOB_ID": "7"},
        {**STEP, "SLURM_JOB_NAME": "interactive"},
        {**STEP, "SLURM_JOB_NAME": "bash"},
        {**STEP, "TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2"},
    ],
)
def test_without_srun_in_its_interactive_shells_and_under_torchrun_the_flags_stay(environment: dict[str, str]) -> None:
    command, before = parse("fit", ["--devices", "3"]), dict(environment)
    apply_slurm(command, environment)
    assert command.flags == ["--trainer.devices=3"] and environment == before
    assert not by_slurm(environment)


def test_several_nodes_by_hand_need_an_address_a_port_and_a_number_each(here: Path) -> None:
    line = (
        "cifar-lit: --nodes 2 needs MASTER_ADDR, MASTER_PORT, NODE_RANK in the environment of each machine, as in "
        "MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 NODE_RANK=0 (to 1) cifar-lit …, or torchrun or SLURM to start it"
    )
    refused(typed("--recipe", "small.yaml", "--nodes", "2"), line, 2)
    (here / "own.yaml").write_text("trainer: {num_nodes: 2}")
    refused(typed("--recipe", "small.yaml", "--config", "own.yaml"), line, 2)
    assert not Path("lightning_logs").exists()


@pytest.mark.parametrize(
    ("environment", "first"),
    [
        ({}, True),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, True),
        ({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, False),
        ({"LOCAL_RANK": "1"}, False),
        ({"LOCAL_RANK": "0", "NODE_RANK": "1"}, False),
    ],
)
def test_the_first_of_all_processes_knows_itself(environment: dict[str, str], first: bool) -> None:
    assert is_first_process(environment) == first


def test_torchrun_starts_again_until_its_restarts_are_used_up() -> None:
    assert starts_again({"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "2"})
    assert not starts_again({"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_MAX_RESTARTS": "2"})
    assert not starts_again({})


def test_how_a_run_goes_on_is_said_by_what_it_has() -> None:
    assert advice("cifar-lit train --resume a", {}) == "Go on with:\n  cifar-lit train --resume a"
    assert advice(None, {}) == "It has no checkpoint yet: start it again."
    assert "torchrun" in advice("x", {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "1"})
