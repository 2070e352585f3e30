"""Jobs that their scheduler starts again."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch.distributed as dist
from cifar_lit.cli.run import Run
from command_line import config_of, metrics_of, refused, typed

from cifar_lit.cli.flags import Command, parse
from cifar_lit.distributed.job import DECIDED, Job, go_on, job_of
from cifar_lit.distributed.rendezvous import agree
from cifar_lit.errors import Failure, UsageError
from cifar_lit.runs.run_folder import RunFolder

SLURM = {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "hill"}
AGAIN = {**SLURM, "SLURM_RESTART_COUNT": "1"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
LINE = ["--recipe", "small.yaml", "--lr", "0.1"]


@pytest.fixture(autouse=True)
def _undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DECIDED, "")  # so that what a start decides is forgotten after each test


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({}, None),
        (SLURM, Job("slurm:hill:7", "SLURM's job 7", again=False)),
        (AGAIN, Job("slurm:hill:7", "SLURM's job 7", again=True)),
        ({"SLURM_JOB_ID": "9", "SLURM_RESTART_COUNT": "0"}, Job("slurm::9", "SLURM's job 9", again=False)),
        (
            {**AGAIN, "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"},
            Job("slurm:hill:5_2", "SLURM's job 5_2", again=True),
        ),
        (TORCHRUN, Job("torchrun:none:41@here", "torchrun's job", again=False)),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "2"}, Job("torchrun:x", "torchrun's job", True)),
        ({**TORCHRUN, **SLURM, "TORCHELASTIC_RESTART_COUNT": "1"}, Job("slurm:hill:7", "SLURM's job 7", again=True)),
        ({**SLURM, "CIFAR_LIT_JOB": "mine"}, Job("mine", "job mine", again=False, named=True)),
    ],
)
def test_a_job_is_known_by_its_name_or_its_schedulers_number(environment: dict[str, str], job: Job | None) -> None:
    assert job_of(environment, 41, "here") == job


def start(words: list[str], environment: dict[str, str], name: str = "train") -> Command:
    command = parse(name, words)
    go_on(command, words, environment, 41, "here")
    return command


def leave(command: Command, name: str = "small-1", checkpoint: bool = True, logs: str = "lightning_logs") -> Path:
    """A run folder as the start that `command` came from would have left it."""
    run = Path(logs, name)
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("{}")
    assert command.job is not None
    (run / ".job").write_text(command.job)
    if checkpoint:
        (run / "checkpoints/last.ckpt").touch()
    return run


def test_a_new_job_is_recorded_and_changes_nothing_else() -> None:
    command, plain = start(LINE, SLURM), parse("train", LINE)
    assert command.job is not None and json.loads(command.job)["job"] == "slurm:hill:7"
    command.job = None
    assert command == plain
    assert start(LINE, {}).job is None
    assert start(["--ckpt_path", "x"], SLURM, "test").job is None


def test_a_job_that_is_started_again_goes_on_with_its_newest_run(capsys: pytest.CaptureFixture[str]) -> None:
    first = start(LINE, SLURM)
    run, newer = leave(first), leave(first, "small-2")
    os.utime(run / "config.yaml", (1, 1))
    leave(first, "small-3", checkpoint=False)
    leave(start(LINE, {**SLURM, "SLURM_JOB_ID": "8"}), "small-4")
    (newer.parent / "torn").mkdir()
    (newer.parent / "torn/.job").write_text("{")
    capsys.readouterr()
    command = start(LINE, AGAIN)
    assert (command.resume, command.recipe, command.logs) == (str(newer), None, "lightning_logs")
    assert command.flags == ["--model.lr=0.1"]  # flags win over the run's settings
    assert capsys.readouterr().err == "going on with lightning_logs/small-2: SLURM's job 7 was started again\n"


def test_a_job_without_a_checkpoint_starts_anew(capsys: pytest.CaptureFixture[str]) -> None:
    leave(start(LINE, SLURM), checkpoint=False)
    command = start(LINE, AGAIN)
    assert (command.resume, command.recipe) == (None, "small.yaml")
    line = "SLURM's job 7 was started again, but has no checkpoint in lightning_logs yet: starting anew\n"
    assert capsys.readouterr().err == line


def test_of_several_trainings_in_a_script_each_goes_on_with_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = [*LINE, "--seed", "1"], [*LINE, "--seed", "2"]
    done = leave(start(first, SLURM))
    (done / "metrics.json").write_text('{"test": {"accuracy": 1}}')
    run = leave(start(second, SLURM), "small-2")
    with pytest.raises(SystemExit) as ended:
        start(first, AGAIN)
    assert ended.value.code == 0
    said = "lightning_logs/small-1 is finished: its results are in …, and SLURM's job 7 has nothing left to do"
    assert capsys.readouterr().out.strip() == said.replace("…", "lightning_logs/small-1/metrics.json")
    assert start(second, AGAIN).resume == str(run)
    assert start([*LINE, "--seed", "3"], AGAIN).resume is None


def test_configurations_and_searches_of_the_first_start_are_not_made_again() -> None:
    Path("own.yaml").write_text("data: {batch_size: 4}\nlogs: runs")
    words = [*LINE, "--config", "own.yaml", "--auto-batch", "--auto-lr", "--batch-size", "8"]
    run = leave(start(words, SLURM), logs="runs")
    command = start(words, AGAIN)
    assert (command.resume, command.configs, command.auto, command.flags) == (str(run), [], set(), [])


def test_every_process_goes_on_with_the_same_run_and_the_first_one_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    again = {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}
    run = leave(start(LINE, TORCHRUN))
    assert start(LINE, {**again, "RANK": "1", "LOCAL_RANK": "1"}).resume == str(run)
    assert capsys.readouterr().err == ""
    assert start(LINE, again).resume == str(run)
    assert os.environ[DECIDED] == str(run)
    # one that the first process starts later, when it has made a run of its own
    named = {"CIFAR_LIT_JOB": "mine"}
    assert start(LINE, named).resume is None
    made = leave(start(LINE, named), "small-2")
    shutil.copytree(made, made.with_name("small-3"))
    assert start(LINE, {**named, "LOCAL_RANK": "1", DECIDED: ""}).resume is None
    assert start(LINE, {**named, "LOCAL_RANK": "1", DECIDED: str(made)}).resume == str(made)


def test_a_line_with_a_resume_of_its_own_is_left_alone_until_its_run_is_finished() -> None:
    run = leave(start(LINE, SLURM))
    words = ["--resume", str(run)]
    assert start(words, AGAIN) == parse("train", words)
    (run / "metrics.json").write_text('{"test": {"accuracy": 1}}')
    assert start(words, SLURM).resume == str(run)
    with pytest.raises(SystemExit):
        start(words, AGAIN)


def test_a_named_job_goes_on_whatever_else_is_on_its_line_but_not_with_another_recipe() -> None:
    named = {"CIFAR_LIT_JOB": "mine"}
    run = leave(start(LINE, named))
    command = start(["--recipe", "small.yaml", "--epochs", "9"], named)
    assert (command.resume, command.recipe, command.flags) == (str(run), None, ["--trainer.max_epochs=9"])
    with pytest.raises(UsageError, match=r"small-1 of job mine began with the recipe small\.yaml: keep to it, or give"):
        start(["--recipe", "tudui"], named)


def test_a_named_job_is_begun_gone_on_with_and_then_finished(here: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CIFAR_LIT_JOB", "mine")
    words = ["--recipe", "small.yaml"]
    first = typed(*words)
    assert (first.code, first.err) == (0, "")
    own = Path("lightning_logs/small-1")
    (own / "metrics.json").unlink()
    again = typed(*words)
    assert (again.code, again.err) == (0, "going on with lightning_logs/small-1: job mine has a run\n")
    assert metrics_of(own)["test"] == metrics_of(run)["test"]
    finished = typed(*words)
    assert (finished.code, finished.err, finished.out.count("\n")) == (0, "", 1)
    assert "lightning_logs/small-1 is finished" in finished.out
    (own / "metrics.json").unlink()
    longer = typed(*words, "--epochs", "3")
    assert longer.code == 0, longer.err
    assert config_of(own)["trainer"]["max_epochs"] == metrics_of(own)["epochs"] == 3
    assert [path.name for path in Path("lightning_logs").iterdir()] == ["small-1"]
    refused(typed("--recipe", "tudui"), "cifar-lit: lightning_logs/small-1 of job mine began with the recipe small.yaml: …", 2)


def test_what_a_job_leaves_in_a_runs_folder_is_in_nobodys_way(run: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(run, Path("runs", name))
        Path("runs", name, ".job").write_text('{"job": "x"}\n')
    assert typed("compare", "runs").code == 0
    assert typed("report", "runs/a").code == 0
    assert typed("test", "--ckpt_path", "runs/a/checkpoints/best.ckpt").code == 0


# ---- where processes that torchrun starts again meet


def test_processes_agree_whatever_an_earlier_attempt_has_left_and_whichever_node_has_counted_it() -> None:
    store = dist.HashStore()
    ports, restarts = [], []
    with ThreadPoolExecutor(3) as processes:
        for counted in ((0, 0, 0), (0, 0, 0), (0, 2, 1)):
            found = list(processes.map(lambda rank, count: agree(store, rank, 3, count, 20.0), (2, 0, 1), counted))
            assert len(set(found)) == 1
            ports.append(found[0][0])
            restarts.append(found[0][1])
    assert len(set(ports)) > 1  # of the system's choice
    assert restarts == [0, 1, 2]


@pytest.mark.parametrize("rank", [0, 1])
def test_processes_do_not_wait_for_ever_for_one_that_never_comes(rank: int) -> None:
    store = dist.HashStore()
    store.set("cifar_lit/hello/1", '["of one that is gone", 0]')
    with pytest.raises(Failure, match=r"has waited 0 s for the others of this run"):
        agree(store, rank, 2, 0, 0.1)


# ---- every process starts from the same checkpoint


class OtherFirst:
    """What a run's setup sees of a Trainer, in the second process of two, the first of which sent `said`."""

    fast_dev_run, is_global_zero, global_rank, checkpoint_callbacks = False, False, 1, ()

    def __init__(self, said: list[str]) -> None:
        self.strategy, self._said = self, said

    def broadcast(self, own: object) -> tuple[str, list[str]]:
        return "logs/small-1", self._said


@pytest.mark.parametrize(
    ("notes", "said", "line"),
    [
        ({"resume": "a-1/checkpoints/last.ckpt", "step": "7"}, ["a-1", "checkpoints", "last.ckpt", "7"], None),
        ({}, [""], None),
        (
            {"resume": "a-1/checkpoints/last.ckpt", "step": "7"},
            ["a-1", "checkpoints", "last.ckpt", "9"],
            "process 1 would start from a-1/checkpoints/last.ckpt of step 7, the first one from a-1/.*last.ckpt of step 9: ",
        ),
        (
            {},
            ["a-1", "checkpoints", "last.ckpt", "9"],
            "from the beginning, the first one from a-1/checkpoints/last.ckpt of step 9",
        ),
    ],
)
def test_processes_that_see_different_checkpoints_do_not_train_together(
    notes: dict[str, str], said: list[str], line: str | None
) -> None:
    run = Run(RunFolder(Path("logs"), "small", first=False), {}, "", notes, "fit")
    folder = run.callbacks(validates=False, bar=False)[1]
    with nullcontext() if line is None else pytest.raises(Failure, match=line):
        folder.setup(OtherFirst(said), None, "fit")  # type: ignore[arg-type]
