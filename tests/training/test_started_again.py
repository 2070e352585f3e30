"""Real torchruns whose processes are killed, which start them again."""

import signal
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from real_runs import SCRIPT, SETTINGS, Done, final_weights, metrics, only_run, run, same_bits

WORDS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2", *SCRIPT, *SETTINGS)


@pytest.fixture(scope="module", autouse=True)
def killed(
    pool: ThreadPoolExecutor, pair_run: Future[object], tmp_path_factory: pytest.TempPathFactory
) -> Future[tuple[Path, Done]]:
    """The second process is killed in the second epoch, of which no checkpoint exists."""
    folder = tmp_path_factory.mktemp("killed-by-torchrun")
    how = {"AT_STEP": "20", "AT_STEP_RANK": "1", "AT_STEP_SIGNAL": str(int(signal.SIGKILL))}
    return pool.submit(lambda: (folder, run(WORDS, folder, **how)))


def test_a_killed_process_costs_an_epoch_and_torchruns_next_attempt_ends_with_the_same_bits(
    killed: Future[tuple[Path, Done]], pair: Path
) -> None:
    folder, done = killed.result()
    assert done.code == 0, done.err
    assert done.err.count("going on with lightning_logs/tudui-1: torchrun's job was started again") == 1
    assert "at epoch 2, step 13" in done.out
    assert same_bits(final_weights(folder), final_weights(pair))
    assert metrics(folder)["test"] == metrics(pair)["test"]
    assert (only_run(folder) / ".job").is_file()


def test_the_process_that_is_left_says_at_most_one_line(killed: Future[tuple[Path, Done]]) -> None:
    _, done = killed.result()
    own = [line for line in done.err.splitlines() if "torch/distributed/elastic" not in line]
    assert len(own) <= 2, done.err  # its own, if it was sooner than torchrun, and that it goes on
    assert "stopping after this step" not in done.err
