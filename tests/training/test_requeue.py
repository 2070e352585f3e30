"""Signals at every stage, and SLURM's that asks for a requeue: with a `scontrol` that only writes down what it is asked."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from contract.command_line import undone
from forked_runs import QUEUED, SLURM, scontrol
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment
from real_runs import SETTINGS, STEPS_PER_EPOCH, assert_same_run, here, only_run, run
from small_runs import classifier

from cifar_lit.training.checkpoint import last_checkpoint, read_checkpoint
from cifar_lit.training.orderly_stop import NoSignalHandlers, OrderlyStop

WORDS = ["train", *SETTINGS]
USR1, TERM = str(int(signal.SIGUSR1)), str(int(signal.SIGTERM))


def test_slurms_signal_leaves_a_checkpoint_and_requeues_and_the_next_start_goes_on_to_the_same_bits(
    tmp_path: Path, alone: Path
) -> None:
    """In the test that follows a training; within it: test_processes."""
    path = scontrol(tmp_path / "bin")
    done = here(WORDS, tmp_path, **SLURM, PATH=path, AT_STAGE="test", AT_STEP_SIGNAL=USR1)
    assert (done.code, done.err) == (138, f"cifar-lit: stopped at its checkpoint; SLURM's job 7 {QUEUED}\n")
    asked = (tmp_path / "bin/asked").read_text().split()
    assert asked[:2] == ["requeue", "7"] and "last.ckpt" in asked
    assert read_checkpoint(only_run(tmp_path) / "checkpoints/last.ckpt")["global_step"] == 3 * STEPS_PER_EPOCH
    again = here(WORDS, tmp_path, **SLURM, SLURM_RESTART_COUNT="1")
    assert (again.code, again.err) == (0, "resuming lightning_logs/tudui-1: SLURM's job 7 was restarted\n")
    assert_same_run(tmp_path, alone)


def test_a_stop_counts_though_a_library_raises_an_error_of_its_own_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As matplotlib's compiled code does with whatever is raised while it converts its arguments."""

    def draw(*_: object) -> None:
        with suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        raise ValueError("Invalid bounding box")

    monkeypatch.setattr("cifar_lit.train.write_report", draw)
    done = here([*WORDS, "--epochs", "1"], tmp_path)
    assert done.code == 143 and "cifar-lit: stopped. Resume with:" in done.err and "Invalid" not in done.err
    monkeypatch.undo()
    assert here(["train", "--resume"], tmp_path).code == 0


def test_a_signal_that_comes_while_libraries_are_imported_waits_for_the_handler(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from cifar_lit.cli import main, quiet; held = quiet.quieten\n"
        "quiet.quieten = lambda: (os.kill(os.getpid(), signal.SIGUSR1), held()); raise SystemExit(main(sys.argv[1:]))"
    )
    done = run(["-c", code, *WORDS], tmp_path, **SLURM, PATH=scontrol(tmp_path / "bin"))
    assert (done.code, done.err) == (138, f"cifar-lit: stopped; SLURM's job 7 {QUEUED}\n")
    assert not (tmp_path / "lightning_logs").exists()


def test_a_requeue_that_fails_says_how_to_go_on_by_hand(tmp_path: Path) -> None:
    array = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}
    path = scontrol(tmp_path / "bin", "echo no permission >&2; exit 1")
    done = here(WORDS, tmp_path, **SLURM, **array, PATH=path, AT_STEP="3", AT_STEP_SIGNAL=USR1)
    assert done.code == 138
    assert f"{QUEUED}\ncifar-lit: requeueing failed: `scontrol requeue 5_2`: " in done.err
    assert done.err.endswith(
        "`scontrol requeue 5_2`: no permission. Resume with:\n  cifar-lit train --resume lightning_logs/tudui-1\n"
    )


@pytest.mark.parametrize(("moment", "step"), [({"AT_STEP": "3", **SLURM}, 4), ({"AT_STAGE": "fit"}, None)])
def test_sigterm_ends_the_command_with_the_checkpoint_that_there_is_and_requeues_nothing(
    tmp_path: Path, moment: dict[str, str], step: int | None
) -> None:
    path = scontrol(tmp_path / "bin")
    done = here(WORDS, tmp_path, **moment, PATH=path, AT_STEP_SIGNAL=TERM)
    assert done.code == 143
    assert done.err.startswith("cifar-lit: stopped")
    assert ("Resume with:" in done.err) == (step is not None)
    if step is not None:
        assert read_checkpoint(only_run(tmp_path) / "checkpoints/last.ckpt")["global_step"] == step
    assert not (tmp_path / "bin/asked").exists()


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
