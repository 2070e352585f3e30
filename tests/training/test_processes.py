import csv
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from real_runs import MODULE, SETTINGS, TORCHRUN, Done, Started, final_weights, free_port, here, metrics, only_run, run, same_bits


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
    with (only_run(folder) / "metrics.csv").open(newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


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
    found = metrics(alone)
    assert found["devices"] == 1
    assert found["test"]["images"] == 24
    assert len(curve(alone, "train/loss")) == 12  # after steps 4, 8, 12 and 13 of each epoch


def test_two_processes_share_each_batch_and_train_the_net_of_one(pair_run: Future[tuple[Path, Done]], alone: Path) -> None:
    folder, done = pair_run.result()
    assert done.code == 0, done.err
    assert "8 = 2 × 4 · 13 steps an epoch" in done.out
    assert done.out.count("test accuracy 0") == 1
    assert done.err == ""
    found, expected = metrics(folder), metrics(alone)
    assert found["devices"] == 2
    assert found["batch_size"] == 8
    assert found["test"]["images"] == 24
    assert found["test"]["loss"] == pytest.approx(expected["test"]["loss"], abs=1e-4)
    for name in ("train/loss", "val/loss", "lr"):
        assert curve(folder, name) == pytest.approx(curve(alone, name), abs=1e-4)
    weights = final_weights(folder)
    for name, tensor in final_weights(alone).items():
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
