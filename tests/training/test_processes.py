"""Real processes, as a user or a cluster starts them: they train as one, stop together, and go on on any number."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forked_runs
import pytest
import torch
from real_runs import (
    LIMIT,
    MODULE,
    SETTINGS,
    STEPS_PER_EPOCH,
    Done,
    Started,
    assert_same_run,
    curves,
    environment,
    final_weights,
    free_port,
    here,
    metrics,
    only_run,
    same_bits,
)
from small_runs import assert_close

from cifar_lit.training.checkpoint import read_checkpoint


def two_nodes(folder: Path) -> list[Done]:
    """One training as two nodes of one process each, both on this machine."""
    port = free_port()
    words = [*MODULE, *SETTINGS, "--nodes", "2", "--devices", "1"]
    nodes = [Started(words, folder, NODE_RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for rank in "01"]
    return [node.wait() for node in nodes]


@pytest.fixture(scope="module", autouse=True)
def nodes(pool: ThreadPoolExecutor, pair_run: Future[object], tmp_path_factory: pytest.TempPathFactory) -> Future[list[Done]]:
    """Started beside the others, waited for by the test that looks at it."""
    return pool.submit(two_nodes, tmp_path_factory.getbasetemp() / "nodes")


def curve(folder: Path, name: str) -> list[float]:
    return [float(row[name]) for row in curves(folder) if row[name]]


def test_two_processes_share_each_batch_and_train_the_net_of_one(pair_run: Future[tuple[Path, Done]], alone: Path) -> None:
    folder, done = pair_run.result()
    assert done.code == 0, done.err
    assert "8 = 2 × 4 · 13 steps an epoch" in done.out
    assert done.out.count("test accuracy 0") == 1
    assert done.err == ""
    results = metrics(folder)
    assert (results["devices"], results["batch_size"], results["test"]["images"]) == (2, 8, 24)
    assert_close_run(folder, alone)
    assert (metrics(alone)["devices"], metrics(alone)["test"]["images"]) == (1, 24)
    assert len(curve(alone, "train/loss")) == 12  # after steps 4, 8, 12 and 13 of each epoch
    first, second = (torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert same_bits(first, second)
    one, two = ((only_run(each) / "predictions.csv").read_text().splitlines() for each in (alone, folder))
    assert [row.split(",")[:2] for row in two] == [row.split(",")[:2] for row in one]
    assert [row.split(",")[0] for row in two[1:]] == [str(number) for number in range(24)]


def assert_close_run(folder: Path, expected: Path) -> None:
    """Both runs are one but for rounding."""
    assert metrics(folder)["test"]["loss"] == pytest.approx(metrics(expected)["test"]["loss"], abs=1e-4)
    for name in ("train/loss", "val/loss", "lr"):
        assert curve(folder, name) == pytest.approx(curve(expected, name), abs=1e-4)
    assert_close(final_weights(folder), final_weights(expected), atol=1e-4)


def test_a_checkpoint_scores_the_same_to_the_last_digit_on_one_process_as_on_two(pair: Path, tmp_path: Path) -> None:
    checkpoint = str(only_run(pair) / "checkpoints" / "best.ckpt")
    done = here(["test", "--ckpt_path", checkpoint, "--devices", "1"], tmp_path)
    assert done.code == 0, done.err
    one, two = metrics(tmp_path), metrics(pair)
    assert (one["devices"], two["devices"]) == (1, 2)
    assert one["test"] == two["test"]


def test_two_nodes_train_as_one_and_write_one_run(
    nodes: Future[list[Done]], pair: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    first, second = nodes.result()
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "8 = 2 × 4" in first.out
    assert second.out == ""
    folder = tmp_path_factory.getbasetemp() / "nodes"
    assert metrics(folder)["devices"] == 2
    assert same_bits(final_weights(folder), final_weights(pair))


# ---- stopped, and gone on with

# 99 images in batches of 8: the last one of 3, which are too few for two or three devices to share
ODD = ["train", *SETTINGS, "--data.count", "119", "--epochs", "2", "--checkpoint-every", "4"]
HOST = ["--data.placement", "host", "--data.workers", "1"]
SUMMED = ["--trainer.accumulate_grad_batches", "2"]
STOP_AT = STEPS_PER_EPOCH + 6
TWO_EPOCHS = 2 * STEPS_PER_EPOCH
# name: the first command, (processes, optimizer step of the signal, signal) of each stage,
# and (exit code of each process, epoch and step of the checkpoint, random states in it)
Stages = list[tuple[int, int, int]]
CASES: dict[str, tuple[list[str], Stages, list[tuple[int, int, int, int]]]] = {
    "two processes": (
        ["train", *SETTINGS],
        [(2, STOP_AT, 2), (2, STOP_AT + STEPS_PER_EPOCH, 9), (2, -1, 0)],
        [(130, 1, STOP_AT + 1, 2), (-9, 1, TWO_EPOCHS, 2), (0, 2, 39, 2)],
    ),
    "two, then three, then one": (
        [*ODD, *HOST],
        [(2, 4, 15), (3, STEPS_PER_EPOCH + 8, 15), (1, -1, 0)],
        [(143, 0, 5, 2), (143, 1, STEPS_PER_EPOCH + 9, 3), (0, 1, TWO_EPOCHS, 1)],
    ),
    "one, then two": ([*ODD, *SUMMED], [(1, 12, 9), (2, -1, 0)], [(-9, 1, 12, 1), (0, 1, 14, 2)]),
}


@pytest.fixture(scope="module", autouse=True)
def forked(pool: ThreadPoolExecutor, nodes: object, tmp_path_factory: pytest.TempPathFactory) -> Future[Any]:
    """The exit codes of every stage of each case; started beside the others."""
    cases: dict[str, Any] = {}
    for name, (words, stages, _) in CASES.items():
        cases[name] = {"folder": str(tmp_path_factory.getbasetemp() / name), "stages": []}
        for number, (processes, step, number_of_signal) in enumerate(stages):
            line = ["train", "--resume", "--devices", str(processes)] if number else words
            how = {"AT_STEP": str(step), "AT_STEP_SIGNAL": str(number_of_signal)}
            cases[name]["stages"].append({"words": line, "processes": processes, "environment": how})

    def made() -> dict[str, list[list[int]]]:
        line = [sys.executable, forked_runs.__file__, json.dumps(cases)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=2 * LIMIT, check=False, env=environment())
        assert done.returncode == 0, done.stderr
        codes: dict[str, list[list[int]]] = json.loads(done.stdout)
        return codes

    return pool.submit(made)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="these trainings are forked")
@pytest.mark.parametrize("name", CASES)
def test_a_training_that_ended_too_soon_goes_on_as_if_undisturbed(
    name: str, forked: Future[Any], pair: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """To the last bit on as many processes, up to rounding on others."""
    codes, folder = forked.result()[name], tmp_path_factory.getbasetemp() / name
    words, stages, expected = CASES[name]
    for number, ((processes, *_), (code, *reached)) in enumerate(zip(stages, expected, strict=True)):
        said = (folder / f"{number}.txt").read_text()
        assert codes[number] == [code] * processes, said
        checkpoint = read_checkpoint(folder / f"{number}.ckpt")
        assert [checkpoint["epoch"], checkpoint["global_step"], len(checkpoint["random_state"][0])] == reached
        assert f"devices      {processes} × cpu" in said
        if code > 128:
            assert said.count("Go on with:") == 1 and "Traceback" not in said
            assert said.count("stopping after this step") == (processes if code == 130 else 0)
    assert metrics(folder)["devices"] == stages[-1][0]
    if words[1:] == SETTINGS:
        assert_same_run(folder, pair)
    else:
        whole = here(words, tmp_path)
        assert whole.code == 0, whole.err
        assert_close_run(folder, tmp_path)


def test_a_training_that_is_stopped_goes_on_by_the_command_that_it_prints(tmp_path: Path, alone: Path) -> None:
    done = here(["train", *SETTINGS], tmp_path, AT_STEP=str(STOP_AT), AT_STEP_SIGNAL="15")
    assert done.code == 143
    assert "Traceback" not in done.err
    last = only_run(tmp_path) / "checkpoints" / "last.ckpt"
    checkpoint, middle = read_checkpoint(last), last.read_bytes()
    assert (checkpoint["epoch"], checkpoint["global_step"]) == (1, STOP_AT + 1)
    assert not (only_run(tmp_path) / "metrics.json").exists()
    before, _, command = done.err.rpartition("Go on with:\n")
    assert before.endswith("cifar-lit: stopped. "), done.err
    words = shlex.split(command)[1:]
    assert words[:2] == ["train", "--resume"]
    shutil.copytree(tmp_path, tmp_path.with_name("faster"))
    resumed = here(words, tmp_path)
    assert resumed.code == 0, resumed.err
    assert "at epoch 2, step 20" in resumed.out
    assert_same_run(tmp_path, alone)

    folder = tmp_path.with_name("faster")  # a rate that is given counts from where the training was
    assert (only_run(folder) / "checkpoints" / "last.ckpt").read_bytes() == middle
    assert here(["train", "--resume", "--lr", "0.2"], folder).code == 0
    for row, usual in zip(curves(folder), curves(alone), strict=True):
        if row["lr"]:
            factor = 10 if int(row["step"]) > STOP_AT + 1 else 1
            assert float(row["lr"]) == pytest.approx(factor * float(usual["lr"]), rel=1e-6)
    assert metrics(folder)["test"] != metrics(alone)["test"]
