"""Signals at every stage, and SLURM's requeue signal, with a fake `scontrol` that records its arguments."""

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
from real_runs import SETTINGS, STEPS_PER_EPOCH, assert_same_run, only_run, run, run_here
from small_runs import classifier

from cifar_lit.training.checkpoint import last_checkpoint, read_checkpoint
from cifar_lit.training.orderly_stop import NoSignalHandlers, OrderlyStop

WORDS = ["train", *SETTINGS]
USR1, TERM = str(int(signal.SIGUSR1)), str(int(signal.SIGTERM))


@pytest.mark.slow
def test_slurms_signal_saves_and_requeues_and_the_restarted_job_ends_bit_equal(tmp_path: Path, alone: Path) -> None:
    """The signal comes in the test after the fit. test_processes has a signal within the fit."""
    path = scontrol(tmp_path / "bin")
    stopped = run_here(WORDS, tmp_path, **SLURM, PATH=path, AT_STAGE="test", AT_STEP_SIGNAL=USR1)
    assert (stopped.code, stopped.err) == (138, f"cifar-lit: stopped at its checkpoint; SLURM's job 7 {QUEUED}\n")
    requests = (tmp_path / "bin/requests").read_text().split()
    assert requests[:2] == ["requeue", "7"] and "last.ckpt" in requests
    assert read_checkpoint(only_run(tmp_path) / "checkpoints/last.ckpt")["global_step"] == 3 * STEPS_PER_EPOCH
    resumed = run_here(WORDS, tmp_path, **SLURM, SLURM_RESTART_COUNT="1")
    assert (resumed.code, resumed.err) == (0, "resuming lightning_logs/tudui-1: SLURM's job 7 was restarted\n")
    assert_same_run(tmp_path, alone)


def test_a_stop_counts_if_a_library_replaces_its_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """matplotlib's compiled code replaces exceptions raised while it converts its arguments."""

    def draw(*_: object) -> None:
        with suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        raise ValueError("Invalid bounding box")

    monkeypatch.setattr("cifar_lit.train.write_report", draw)
    answer = run_here([*WORDS, "--epochs", "1"], tmp_path)
    assert answer.code == 143 and "cifar-lit: stopped. Resume with:" in answer.err and "Invalid" not in answer.err
    monkeypatch.undo()
    assert run_here(["train", "--resume"], tmp_path).code == 0


@pytest.mark.slow
def test_a_signal_during_imports_waits_for_the_handler(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from cifar_lit.cli import main, quiet; held = quiet.quieten\n"
        "quiet.quieten = lambda: (os.kill(os.getpid(), signal.SIGUSR1), held()); raise SystemExit(main(sys.argv[1:]))"
    )
    answer = run(["-c", code, *WORDS], tmp_path, **SLURM, PATH=scontrol(tmp_path / "bin"))
    assert (answer.code, answer.err) == (138, f"cifar-lit: stopped; SLURM's job 7 {QUEUED}\n")
    assert not (tmp_path / "lightning_logs").exists()


def test_a_failed_requeue_prints_the_command_to_resume(tmp_path: Path) -> None:
    array = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}
    path = scontrol(tmp_path / "bin", "echo no permission >&2; exit 1")
    answer = run_here(WORDS, tmp_path, **SLURM, **array, PATH=path, AT_STEP="3", AT_STEP_SIGNAL=USR1)
    assert answer.code == 138
    assert f"{QUEUED}\ncifar-lit: requeueing failed: `scontrol requeue 5_2`: " in answer.err
    assert answer.err.endswith(
        "`scontrol requeue 5_2`: no permission. Resume with:\n  cifar-lit train --resume lightning_logs/tudui-1\n"
    )


@pytest.mark.parametrize(("moment", "step"), [({"AT_STEP": "3", **SLURM}, 4), ({"AT_STAGE": "fit"}, None)])
def test_sigterm_ends_the_command_with_its_latest_checkpoint_and_no_requeue(
    tmp_path: Path, moment: dict[str, str], step: int | None
) -> None:
    path = scontrol(tmp_path / "bin")
    answer = run_here(WORDS, tmp_path, **moment, PATH=path, AT_STEP_SIGNAL=TERM)
    assert answer.code == 143
    assert answer.err.startswith("cifar-lit: stopped")
    assert ("Resume with:" in answer.err) == (step is not None)
    if step is not None:
        assert read_checkpoint(only_run(tmp_path) / "checkpoints/last.ckpt")["global_step"] == step
    assert not (tmp_path / "bin/requests").exists()


@pytest.mark.parametrize("auto", [True, False])
def test_without_auto_requeue_the_signal_has_its_default_action(monkeypatch: pytest.MonkeyPatch, auto: bool) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    trainer = Trainer(accelerator="cpu", plugins=[SLURMEnvironment(auto_requeue=auto)], logger=False, barebones=True)
    stop, model = OrderlyStop(last_checkpoint()), classifier()
    with undone():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        stop.setup(trainer, model, "fit")
        stop.on_train_start(trainer, model)
        handler = signal.getsignal(signal.SIGUSR1)
    assert (handler == stop._receive) if auto else (handler is signal.SIG_DFL)


def test_lightnings_signal_handlers_are_not_registered() -> None:
    trainer = Trainer(accelerator="cpu", logger=False, barebones=True)
    assert callable(trainer._signal_connector.register_signal_handlers)  # private: a release may rename it
    before = signal.getsignal(signal.SIGTERM)
    with undone():
        NoSignalHandlers().setup(trainer, torch.nn.Module(), "test")  # type: ignore[arg-type]
        trainer._signal_connector.register_signal_handlers()
        assert signal.getsignal(signal.SIGTERM) == before
