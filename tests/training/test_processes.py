"""Processes started by a user or a cluster train as one, stop together, and resume on any number of devices."""

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.command_line import Answer, files_of
from forked_runs import Stage, run_stages
from real_runs import (
    SETTINGS,
    STEPS_PER_EPOCH,
    assert_same_run,
    curves,
    final_weights,
    metrics,
    only_run,
    run_here,
    same_bits,
)
from small_runs import assert_close

from cifar_lit.training.checkpoint import read_checkpoint


def curve(folder: Path, name: str) -> list[float]:
    return [float(row[name]) for row in curves(folder) if row[name]]


def assert_close_run(folder: Path, expected: Path) -> None:
    """Assert that both runs are equal up to rounding."""
    assert metrics(folder)["test"]["loss"] == pytest.approx(metrics(expected)["test"]["loss"], abs=1e-4)
    for name in ("train/loss", "val/loss", "lr"):
        assert curve(folder, name) == pytest.approx(curve(expected, name), abs=1e-4)
    assert_close(final_weights(folder), final_weights(expected), atol=1e-4)


# ---- stopped or killed, and resumed


def at(step: int, number: int, **more: str) -> dict[str, str]:
    """Return the environment that sends a signal in the given step."""
    return {"AT_STEP": str(step), "AT_STEP_SIGNAL": str(int(number)), **more}


WORDS = ["train", *SETTINGS]
# 99 images in batches of 8. Two or three devices cannot share the last batch, of 3, evenly.
ODD = [*WORDS, "--data.count", "119", "--epochs", "2", "--checkpoint-every", "4"]
HOST = ["--data.placement", "host", "--data.workers", "1"]
ONE, TWO, THREE = (["train", "--resume", "--trust", "--devices", number] for number in "123")
AGENT = {"TORCHELASTIC_MAX_RESTARTS": "2", "TORCHELASTIC_RESTART_COUNT": "0"}
STOP_AT, END = STEPS_PER_EPOCH + 6, (2, 3 * STEPS_PER_EPOCH, 2)
CASES = {
    "two processes": [
        Stage(WORDS, 2, at(STOP_AT, signal.SIGINT), [130] * 2, (1, STOP_AT + 1, 2)),
        Stage(TWO, 2, at(STOP_AT + STEPS_PER_EPOCH, signal.SIGKILL), [-9] * 2, (1, 2 * STEPS_PER_EPOCH, 2)),
        Stage(TWO, 2, {}, [0] * 2, END),
    ],
    "torchrun restarts both": [
        Stage(WORDS, 2, AGENT | at(STOP_AT, signal.SIGKILL, AT_STEP_RANK="1"), [1, -9], (0, STEPS_PER_EPOCH, 2)),
        Stage(WORDS, 2, AGENT | {"TORCHELASTIC_RESTART_COUNT": "1"}, [0] * 2, END),
    ],
    "two, then three, then one": [
        Stage([*ODD, *HOST], 2, at(4, signal.SIGHUP), [129] * 2, (0, 5, 2)),
        Stage(THREE, 3, at(STEPS_PER_EPOCH + 8, signal.SIGTERM), [143] * 3, (1, STEPS_PER_EPOCH + 9, 3)),
        Stage(ONE, 1, {}, [0], (1, 2 * STEPS_PER_EPOCH, 1)),
    ],
}


@pytest.fixture(scope="module")
def stages(
    forking: Callable[..., Any], pool: ThreadPoolExecutor, pair_run: object, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Future[tuple[Path, dict[str, list[list[int]]]]]]:
    """Run all cases in the background. The result is their folder and the exit codes of every stage of each case."""
    folder = tmp_path_factory.mktemp("stages")
    yield pool.submit(lambda: (folder, forking(run_stages, cases=CASES, folder=str(folder))))


def test_two_processes_share_batches_and_train_the_same_net(pair_run: Future[tuple[Path, Answer]], alone: Path) -> None:
    folder, answer = pair_run.result()
    assert answer.code == 0, answer.err
    assert "8 = 2 × 4 · 13 steps per epoch" in answer.out
    assert answer.out.count("test accuracy 0") == 1
    assert answer.err == ""
    results = metrics(folder)
    assert (results["devices"], results["batch_size"], results["test"]["images"]) == (2, 8, 24)
    pictures = {"curves.png", "confusion_matrix.png"}  # `alone` draws none
    assert files_of(only_run(folder)) - pictures == files_of(only_run(alone))
    assert_close_run(folder, alone)
    assert (metrics(alone)["devices"], metrics(alone)["test"]["images"]) == (1, 24)
    assert len(curve(alone, "train/loss")) == 12  # after steps 4, 8, 12 and 13 of each epoch
    first, second = (torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert same_bits(first, second)
    one, two = ((only_run(each) / "predictions.csv").read_text().splitlines() for each in (alone, folder))
    assert [row.split(",")[:2] for row in two] == [row.split(",")[:2] for row in one]
    assert [row.split(",")[0] for row in two[1:]] == [str(number) for number in range(24)]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_run_in_stages_ends_like_an_uninterrupted_one(
    name: str, stages: Future[tuple[Path, dict[str, list[list[int]]]]], pair: Path, tmp_path: Path
) -> None:
    """The runs are bit-equal on the same number of processes, and equal up to rounding on others."""
    root, codes = stages.result()
    folder, case = root / name, CASES[name]
    sizes = [len(stage.codes) for stage in case]
    printed = [
        [(folder / f"{number}-{rank}.txt").read_text() for rank in range(size)] for number, size in enumerate(sizes)
    ]
    for number, stage in enumerate(case):
        assert codes[name][number] == stage.codes, printed[number]
        checkpoint = read_checkpoint(folder / f"{number}.ckpt")
        assert (checkpoint["epoch"], checkpoint["global_step"], len(checkpoint["random_state"][0])) == stage.reached
        assert f"devices      {len(stage.codes)} × cpu" in printed[number][0]
        text = "".join(printed[number])
        assert "Traceback" not in text
        assert text.count("Resume with:") == (stage.codes[0] in (1, 129, 130, 143))
        assert text.count("stopping after this step") == (2 if stage.codes[0] == 130 else 0)
    if name == "torchrun restarts both":
        assert "another process of this run ended early" in printed[0][0]
        assert printed[1][0].count("resuming lightning_logs/tudui-1 of job torchrun:forks") == 1
        assert "at epoch 2, step 13" in printed[1][0]
        assert (only_run(folder) / ".job").is_file()
    assert metrics(folder)["devices"] == len(case[-1].codes)
    if case[0].words[: len(ODD)] != ODD:
        assert_same_run(folder, pair)
    else:
        whole = run_here(case[0].words, tmp_path)
        assert whole.code == 0, whole.err
        assert_close_run(folder, tmp_path)
