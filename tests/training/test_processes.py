"""Real processes, as a user, torchrun or a cluster starts them: they train as one, stop together, and go on on any number."""

import json
import os
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
    TORCHRUN,
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
    run,
    same_bits,
)

from cifar_lit.training.checkpoint import read_checkpoint


def two_nodes(folder: Path) -> list[Done]:
    """One training as two nodes of one process each, both on this machine."""
    port = free_port()
    words = [*MODULE, *SETTINGS, "--nodes", "2", "--devices", "1"]
    nodes = [Started(words, folder, NODE_RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for rank in "01"]
    return [node.wait() for node in nodes]


@pytest.fixture(scope="module", autouse=True)
def torchrun(pool: ThreadPoolExecutor, pair_run: Future[object], tmp_path_factory: pytest.TempPathFactory) -> Future[Done]:
    """Started beside the others, waited for by the test that looks at it."""
    return pool.submit(run, [*TORCHRUN, *SETTINGS], tmp_path_factory.getbasetemp() / "torchrun")


@pytest.fixture(scope="module", autouse=True)
def nodes(pool: ThreadPoolExecutor, torchrun: object, tmp_path_factory: pytest.TempPathFactory) -> Future[list[Done]]:
    return pool.submit(two_nodes, tmp_path_factory.getbasetemp() / "nodes")


def curve(folder: Path, name: str) -> list[float]:
    return [float(row[name]) for row in curves(folder) if row[name]]


@pytest.mark.parametrize(
    ("started", "flags", "line"),
    [
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}, ["--devices", "3"], "--devices 3 contradicts torchrun, which started 2"),
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}, ["--nodes", "1"], "--nodes 1 contradicts torchrun, which started 2"),
        ({"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "1"}, ["--trainer.devices=2"], "--devices 2 contradicts torchrun"),
    ],
)
def test_flags_that_contradict_torchrun_are_refused(tmp_path: Path, started: dict[str, str], flags: list[str], line: str) -> None:
    done = here(["train", *SETTINGS, *flags], tmp_path, TORCHELASTIC_RUN_ID="x", RANK="0", LOCAL_RANK="0", **started)
    assert done.code == 2
    assert line in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "lightning_logs").exists()


def test_a_run_in_one_process_says_what_it_does_and_writes_its_results(alone: Path) -> None:
    results = metrics(alone)
    assert (results["devices"], results["test"]["images"]) == (1, 24)
    assert len(curve(alone, "train/loss")) == 12  # after steps 4, 8, 12 and 13 of each epoch


def test_two_processes_share_each_batch_and_train_the_net_of_one(pair_run: Future[tuple[Path, Done]], alone: Path) -> None:
    folder, done = pair_run.result()
    assert done.code == 0, done.err
    assert "8 = 2 × 4 · 13 steps an epoch" in done.out
    assert done.out.count("test accuracy 0") == 1
    assert done.err == ""
    results = metrics(folder)
    assert (results["devices"], results["batch_size"], results["test"]["images"]) == (2, 8, 24)
    assert_close_run(folder, alone)


def assert_close_run(folder: Path, expected: Path) -> None:
    """Both runs are one but for rounding."""
    assert metrics(folder)["test"]["loss"] == pytest.approx(metrics(expected)["test"]["loss"], abs=1e-4)
    for name in ("train/loss", "val/loss", "lr"):
        assert curve(folder, name) == pytest.approx(curve(expected, name), abs=1e-4)
    weights = final_weights(folder)
    for name, tensor in final_weights(expected).items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-4, msg=name)


def test_both_processes_end_with_the_same_weights(pair: Path) -> None:
    first, second = (torch.load(pair / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert same_bits(first, second)


def test_a_checkpoint_scores_the_same_to_the_last_digit_on_one_process_as_on_two(pair: Path, tmp_path: Path) -> None:
    checkpoint = str(only_run(pair) / "checkpoints" / "best.ckpt")
    done = here(["test", "--ckpt_path", checkpoint, "--devices", "1"], tmp_path)
    assert done.code == 0, done.err
    one, two = metrics(tmp_path), metrics(pair)
    assert (one["devices"], two["devices"]) == (1, 2)
    assert one["test"] == two["test"]
    assert one["test"]["images"] == 24


def test_torchrun_starts_the_same_training(torchrun: Future[Done], pair: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    done = torchrun.result()
    assert done.code == 0, done.err
    assert "8 = 2 × 4" in done.out
    assert same_bits(final_weights(tmp_path_factory.getbasetemp() / "torchrun"), final_weights(pair))


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
    "killed": (["train", *SETTINGS], [(1, STOP_AT, 9), (1, -1, 0)], [(-9, 0, STEPS_PER_EPOCH, 1), (0, 2, 39, 1)]),
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
    name: str, forked: Future[Any], alone: Path, pair: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
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
        assert_same_run(folder, alone if stages[0][0] == 1 else pair)
    else:
        whole = here(words, tmp_path)
        assert whole.code == 0, whole.err
        assert_close_run(folder, tmp_path)
