"""Commands that are stopped go on by what they print, to the same bits as if they had not been."""

import shlex
import signal
from pathlib import Path

import pytest
from real_runs import SETTINGS, STEPS_PER_EPOCH, Done, assert_same_run, curves, here, metrics, only_run

from cifar_lit.training.checkpoint import read_checkpoint

STOP_AT = STEPS_PER_EPOCH + 6  # in the middle of the second epoch; 20 steps are done once the one that runs has ended


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
    before, _, command = done.err.rpartition("Go on with:\n")
    assert before.endswith("cifar-lit: stopped. "), done.err
    words = shlex.split(command)[1:]
    assert words[:2] == ["train", "--resume"]
    resumed = here(words, tmp_path)
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
