"""Several batches at a time on two processes: both take the same steps."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from real_runs import MODULE, SETTINGS, Done, final_weights, here, metrics, only_run, run
from torch import Tensor

from cifar_lit.data.datamodule import ImageData
from cifar_lit.models.registry import build_net
from cifar_lit.training.checkpoint import read_checkpoint

PAIR = [*MODULE, *SETTINGS, "--devices", "2", "--model.ema_decay", "0", "--data.chunk", "3"]
WHITENED = ["--net", "whitened", "--model.net_options", '{"widths": [8, 12]}', "--epochs", "1", "--model.schedule", "triangular"]


@pytest.fixture(scope="module", autouse=True)
def chunked(pool: ThreadPoolExecutor, tmp_path_factory: pytest.TempPathFactory) -> Future[Done]:
    """Started beside the others, waited for by the tests that look at them."""
    folder = tmp_path_factory.getbasetemp() / "chunked"
    return pool.submit(run, PAIR, folder, RANK_WEIGHTS=str(folder))


@pytest.fixture(scope="module", autouse=True)
def whitened(pool: ThreadPoolExecutor, tmp_path_factory: pytest.TempPathFactory) -> Future[Done]:
    folder = tmp_path_factory.getbasetemp() / "whitened"
    return pool.submit(run, [*PAIR, *WHITENED], folder, RANK_WEIGHTS=str(folder))


def of_both(folder: Path) -> list[dict[str, Tensor]]:
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


def assert_same_parameters(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """Norms' running statistics are each process' own between evaluations, as in Lightning."""
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert "running" in name or torch.equal(second[name], tensor), name


def test_both_processes_end_with_the_same_weights_which_are_those_of_single_batches_in_one(
    chunked: Future[Done], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    done, folder = chunked.result(), tmp_path_factory.getbasetemp() / "chunked"
    assert done.code == 0, done.err
    assert "8 = 2 × 4 · 13 steps an epoch" in done.out
    assert read_checkpoint(only_run(folder) / "checkpoints" / "last.ckpt")["global_step"] == 39
    first, second = of_both(folder)
    assert_same_parameters(first, second)
    alone = here(["train", *SETTINGS, "--model.ema_decay", "0", "--data.chunk", "1"], tmp_path)
    assert alone.code == 0, alone.err
    found = final_weights(folder)
    for name, tensor in final_weights(tmp_path).items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-4, msg=name)
    assert metrics(folder)["test"]["images"] == 24
    assert metrics(folder)["test"]["loss"] == pytest.approx(metrics(tmp_path)["test"]["loss"], abs=1e-4)


def test_both_processes_whiten_with_the_filters_of_the_first(
    whitened: Future[Done], tmp_path_factory: pytest.TempPathFactory
) -> None:
    done, folder = whitened.result(), tmp_path_factory.getbasetemp() / "whitened"
    assert done.code == 0, done.err
    first, second = of_both(folder)
    assert_same_parameters(first, second)
    data = ImageData("shapes", count=121, val_size=20, image_size=16, mean=0.5, std=0.25)
    net = build_net("whitened", channels=3, image_size=16, num_classes=10, options={"widths": [8, 12]})
    net.initialise(data.plain_images(5000))  # type: ignore[operator]
    torch.testing.assert_close(first["net.whiten.weight"], net.whiten.weight, rtol=1e-4, atol=1e-5)
    assert bool(second["net.whitened"])
