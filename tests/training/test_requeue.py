"""Signals at every stage, and SLURM's that asks for a requeue: with a `scontrol` that only writes down what it is asked."""

import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment
from real_runs import (
    MODULE,
    SETTINGS,
    STEPS_PER_EPOCH,
    Done,
    Started,
    final_weights,
    free_port,
    here,
    metrics,
    only_run,
    run,
    same_bits,
    undone,
)
from small_runs import classifier

from cifar_lit.training.callbacks import NoSignalHandlers, OrderlyStop
from cifar_lit.training.checkpoint import last_checkpoint, read_checkpoint

WORDS = ["train", *SETTINGS]
USR1 = str(int(signal.SIGUSR1))
SLURM = {
    **{"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "night", "SLURM_CLUSTER_NAME": "hill", "SLURM_STEP_ID": "0"},
    **{"SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
}
QUEUED = "is queued again, and will go on by itself"


def scontrol(folder: Path, script: str = "exit 0") -> str:
    """A PATH with a `scontrol` of our own in front, which notes its words, and the checkpoint that there was by then."""
    folder.mkdir(parents=True, exist_ok=True)
    command = folder / "scontrol"
    command.write_text(f'#!/bin/sh\necho "$@" >> "{folder}/asked"\nls */*/checkpoints >> "{folder}/asked"\n{script}\n')
    command.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def two_tasks(folder: Path) -> list[list[Done]]:
    """Two tasks of one step, of which the second gets the signal; then what SLURM starts again."""
    path, done = scontrol(folder / "bin"), []
    for restarts in "01":
        both = {**SLURM, "SLURM_NTASKS": "2", "SLURM_RESTART_COUNT": restarts, "MASTER_PORT": free_port(), "PATH": path}
        both |= {"MASTER_ADDR": "127.0.0.1", "AT_STEP": "20", "AT_STEP_RANK": "1", "AT_STEP_SIGNAL": USR1}
        ranks = [{"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"]
        tasks = [Started([*MODULE, *SETTINGS], folder, **{**both, **rank}) for rank in ranks]
        done.append([task.wait() for task in tasks])
    return done


@pytest.fixture(scope="module", autouse=True)
def tasks(
    pool: ThreadPoolExecutor, pair_run: Future[object], tmp_path_factory: pytest.TempPathFactory
) -> Future[tuple[Path, list[list[Done]]]]:
    """Started beside the others, waited for by the test that looks at it."""
    folder = tmp_path_factory.mktemp("tasks")
    return pool.submit(lambda: (folder, two_tasks(folder)))


def test_slurms_signal_writes_a_checkpoint_then_requeues_and_the_next_start_goes_on_to_the_same_bits(
    tmp_path: Path, alone: Path
) -> None:
    path = scontrol(tmp_path / "bin")
    done = here(WORDS, tmp_path, **SLURM, PATH=path, AT_STEP="20", AT_STEP_SIGNAL=USR1)
    assert (done.code, done.err) == (138, f"cifar-lit: stopped at its checkpoint; SLURM's job 7 {QUEUED}\n")
    assert (tmp_path / "bin/asked").read_text().split() == ["requeue", "7", "best.ckpt", "last.ckpt", "previous.ckpt"]
    assert read_checkpoint(only_run(tmp_path) / "checkpoints/last.ckpt")["global_step"] == 21
    again = here(WORDS, tmp_path, **SLURM, SLURM_RESTART_COUNT="1")
    assert (again.code, again.err) == (0, "going on with lightning_logs/tudui-1: SLURM's job 7 was started again\n")
    assert "at epoch 2, step 21" in again.out
    assert same_bits(final_weights(tmp_path), final_weights(alone))


@pytest.mark.parametrize(
    ("stage", "step", "said"),
    [
        ("fit", None, "stopped;"),
        ("validation", STEPS_PER_EPOCH, "stopped at its checkpoint;"),
        ("test", 39, "stopped at its checkpoint;"),
    ],
)
def test_outside_of_steps_it_does_the_same_with_the_checkpoint_that_there_is(
    tmp_path: Path, alone: Path, stage: str, step: int | None, said: str
) -> None:
    path = scontrol(tmp_path / "bin")
    done = here(WORDS, tmp_path, **SLURM, PATH=path, AT_STAGE=stage, AT_STEP_SIGNAL=USR1)
    assert done.code == 138
    assert done.err.startswith(f"cifar-lit: {said}") and QUEUED in done.err
    began = only_run(tmp_path)
    if step is not None:
        assert read_checkpoint(began / "checkpoints/last.ckpt")["global_step"] == step
    assert here(WORDS, tmp_path, **SLURM, SLURM_RESTART_COUNT="1").code == 0
    last = sorted((tmp_path / "lightning_logs").iterdir())[-1]
    assert (last == began) == (step is not None)
    assert (last / "metrics.json").is_file()
    if step is not None:
        assert metrics(tmp_path)["test"] == metrics(alone)["test"]


def test_a_signal_that_comes_while_libraries_are_imported_waits_for_the_handler(tmp_path: Path) -> None:
    path = scontrol(tmp_path / "bin")
    code = (
        "import os, signal, sys; from cifar_lit.cli import main, quiet; held = quiet.quieten\n"
        "quiet.quieten = lambda: (os.kill(os.getpid(), signal.SIGUSR1), held()); raise SystemExit(main(sys.argv[1:]))"
    )
    done = run(["-c", code, *WORDS], tmp_path, **SLURM, PATH=path)
    assert (done.code, done.err) == (138, f"cifar-lit: stopped; SLURM's job 7 {QUEUED}\n")
    assert not (tmp_path / "lightning_logs").exists()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'slurm_requeue error: no permission' >&2; exit 1", "slurm_requeue error: no permission"),
        ("exit 3", "it ended with 3"),
    ],
)
def test_a_requeue_that_fails_says_how_to_go_on_by_hand(tmp_path: Path, script: str, reason: str) -> None:
    array = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}
    path = scontrol(tmp_path / "bin", script)
    done = here(WORDS, tmp_path, **SLURM, **array, PATH=path, AT_STEP="3", AT_STEP_SIGNAL=USR1)
    assert done.code == 138
    line = f"cifar-lit: it is not, as `scontrol requeue 5_2` failed: {reason}. Go on with:\n"
    assert done.err.endswith(f" {QUEUED}\n{line}  cifar-lit train --resume lightning_logs/tudui-1\n")


def test_sigterm_in_slurm_writes_a_checkpoint_as_elsewhere_and_requeues_nothing(tmp_path: Path) -> None:
    path = scontrol(tmp_path / "bin")
    done = here(WORDS, tmp_path, **SLURM, PATH=path, AT_STEP="3", AT_STEP_SIGNAL=str(int(signal.SIGTERM)))
    assert (done.code, done.err.count("Go on with:")) == (143, 1)
    assert read_checkpoint(only_run(tmp_path) / "checkpoints/last.ckpt")["global_step"] == 4
    assert not (tmp_path / "bin/asked").exists()


@pytest.mark.parametrize("stage", ["fit", "test"])
def test_sigterm_outside_of_steps_ends_the_command_where_it_is(tmp_path: Path, stage: str) -> None:
    done = here(WORDS, tmp_path, AT_STAGE=stage, AT_STEP_SIGNAL=str(int(signal.SIGTERM)))
    assert done.code == 143
    assert done.err.startswith("cifar-lit: stopped")
    assert ("Go on with:" in done.err) == (stage == "test")


def test_of_two_tasks_one_gets_the_signal_both_stop_and_the_first_requeues(
    tasks: Future[tuple[Path, list[list[Done]]]], pair: Path
) -> None:
    folder, ((first, second), again) = tasks.result()
    assert (first.code, second.code) == (138, 138), first.err + second.err
    assert (QUEUED in first.err, second.err) == (True, "")
    assert (folder / "bin/asked").read_text().split()[:2] == ["requeue", "7"]
    assert [done.code for done in again] == [0, 0], again[0].err + again[1].err
    assert "8 = 2 × 4" in again[0].out and "at epoch 2, step 21" in again[0].out and again[1].out == ""
    assert same_bits(final_weights(folder), final_weights(pair))


@pytest.mark.parametrize("auto", [True, False])
def test_without_auto_requeue_the_signal_is_left_to_the_system(monkeypatch: pytest.MonkeyPatch, auto: bool) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    trainer = Trainer(accelerator="cpu", plugins=[SLURMEnvironment(auto_requeue=auto)], logger=False, barebones=True)
    stop, model = OrderlyStop(last_checkpoint()), classifier()
    with undone():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        stop.setup(trainer, model, "fit")
        stop.on_train_start(trainer, model)
        taken = signal.getsignal(signal.SIGUSR1)
    assert (taken == stop._receive) if auto else (taken is signal.SIG_DFL)


def test_the_trainer_has_the_method_that_takes_the_signals_and_it_is_not_run() -> None:
    trainer = Trainer(accelerator="cpu", logger=False, barebones=True)
    assert callable(trainer._signal_connector.register_signal_handlers)  # private: a release may rename it
    before = signal.getsignal(signal.SIGTERM)
    with undone():
        NoSignalHandlers().setup(trainer, torch.nn.Module(), "test")  # type: ignore[arg-type]
        trainer._signal_connector.register_signal_handlers()
        assert signal.getsignal(signal.SIGTERM) == before
