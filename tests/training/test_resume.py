import csv
import shlex
import shutil
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from real_runs import (
    MODULE,
    SCRIPT,
    SETTINGS,
    STEPS_PER_EPOCH,
    Done,
    final_weights,
    here,
    metrics,
    only_run,
    run,
    same_bits,
    stopped,
)

from cifar_lit.files import PART
from cifar_lit.training.checkpoint import read_checkpoint

STOP_AT = STEPS_PER_EPOCH + 6  # in the middle of the second epoch; 20 steps are done once the one that runs has ended


def command_to_go_on(done: Done) -> list[str]:
    """The words after the program's name in what an interrupted run printed."""
    before, _, command = done.err.rpartition("Go on with:\n")
    assert before.endswith("cifar-lit: stopped. "), done.err
    return shlex.split(command)[1:]


@pytest.fixture(scope="module", autouse=True)
def killed(pool: ThreadPoolExecutor, tmp_path_factory: pytest.TempPathFactory) -> Future[Done]:
    """A training in one process, killed in mid-epoch."""
    folder = tmp_path_factory.getbasetemp() / "killed"
    return pool.submit(stopped, [*MODULE, *SETTINGS], folder, STOP_AT, signal.SIGKILL)


@pytest.fixture(scope="module", autouse=True)
def stopped_pair(pool: ThreadPoolExecutor, killed: object, tmp_path_factory: pytest.TempPathFactory) -> Future[list[Done]]:
    """A training in two processes: stopped with Ctrl-C, gone on with as it said, killed an epoch later, and resumed."""
    folder = tmp_path_factory.getbasetemp() / "stopped-pair"

    def stop_and_go() -> list[Done]:
        first = stopped([*SCRIPT, *SETTINGS, "--devices", "2"], folder, STOP_AT, signal.SIGINT)
        shutil.copy(only_run(folder) / "checkpoints" / "last.ckpt", folder / "middle.ckpt")
        second = stopped(command_to_go_on(first), folder, STOP_AT + STEPS_PER_EPOCH, signal.SIGKILL)
        return [first, second, run([*MODULE, "--resume"], folder)]

    return pool.submit(stop_and_go)


def curves(folder: Path) -> list[dict[str, str]]:
    with (only_run(folder) / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def assert_same_run(folder: Path, expected: Path) -> None:
    """Both runs ended with the same weights, results and curves, to the last digit."""
    assert same_bits(final_weights(folder), final_weights(expected))
    assert curves(folder) == curves(expected)
    timed = {"train_seconds", "images_per_second"}
    found, wanted = ({name: value for name, value in metrics(each).items() if name not in timed} for each in (folder, expected))
    assert found == wanted
    assert not list(folder.rglob(f"*{PART}"))
    assert not list(folder.rglob(".lock"))


def interrupted(folder: Path, number: int, *flags: str) -> Done:
    """A training in this process that gets a signal in mid-epoch."""
    return here(["train", *SETTINGS, *flags], folder, AT_STEP=str(STOP_AT), AT_STEP_SIGNAL=str(number))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_training_that_is_stopped_goes_on_by_the_command_that_it_prints(tmp_path: Path, alone: Path, number: int) -> None:
    done = interrupted(tmp_path, number)
    assert done.code == 128 + number
    assert "Traceback" not in done.err
    checkpoint = read_checkpoint(only_run(tmp_path) / "checkpoints" / "last.ckpt")
    assert (checkpoint["epoch"], checkpoint["global_step"]) == (1, STOP_AT + 1)
    assert not (only_run(tmp_path) / "metrics.json").exists()
    command = command_to_go_on(done)
    assert command[:2] == ["train", "--resume"]
    resumed = here(command, tmp_path)
    assert resumed.code == 0, resumed.err
    assert "at epoch 2, step 20" in resumed.out
    assert_same_run(tmp_path, alone)


def test_a_resumed_training_uses_the_rate_asked_for_and_says_which_run_it_goes_on_with(tmp_path: Path, alone: Path) -> None:
    interrupted(tmp_path, signal.SIGINT)
    assert here(["train", "--resume", "--lr", "0.002"], tmp_path).code == 0
    for row, usual in zip(curves(tmp_path), curves(alone), strict=True):
        if row["lr"]:
            factor = 0.1 if int(row["step"]) > STOP_AT + 1 else 1.0
            assert float(row["lr"]) == pytest.approx(factor * float(usual["lr"]), rel=1e-6)
    assert metrics(tmp_path)["test"] != metrics(alone)["test"]


def test_a_finished_training_is_not_resumed_but_named(alone: Path) -> None:
    done = here(["train", "--resume"], alone)
    assert done.code == 2
    assert "is finished: its results are in" in done.err
    assert done.err.count("\n") == 1


def test_a_killed_training_resumes_to_the_same_bits(
    killed: Future[Done], alone: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "killed"
    assert killed.result().code == -signal.SIGKILL
    kept = read_checkpoint(only_run(folder) / "checkpoints" / "last.ckpt")
    assert kept["global_step"] == STEPS_PER_EPOCH
    assert max(int(row["step"]) for row in curves(folder)) > STEPS_PER_EPOCH
    resumed = here(["train", "--resume"], folder)
    assert resumed.code == 0, resumed.err
    assert_same_run(folder, alone)


def test_two_processes_stop_at_the_same_step_and_go_on_to_the_same_bits_as_if_undisturbed(
    stopped_pair: Future[list[Done]], pair: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "stopped-pair"
    first, second, third = stopped_pair.result()
    assert first.code == 130
    assert first.err.count("stopping after this step") == 2 and "Traceback" not in first.err
    assert first.err.count("Go on with:") == 1
    checkpoint = read_checkpoint(folder / "middle.ckpt")
    assert (checkpoint["epoch"], checkpoint["global_step"]) == (1, STOP_AT + 1)
    assert second.code == -signal.SIGKILL
    assert "at epoch 2, step 20" in second.out
    assert third.code == 0, third.err
    assert "devices      2 × cpu" in third.out and "at epoch 3, step 26" in third.out
    assert_same_run(folder, pair)
