"""Signals at every stage, and SLURM's requeue signal, with a fake `scontrol` that records its arguments."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from contract.command_line import undone
from forked_runs import SLURM, scontrol
from lightning.pytorch import Trainer
from real_runs import SETTINGS, only_run, run_here

from cifar_lit.training.checkpoint import read_checkpoint
from cifar_lit.training.orderly_stop import NoSignalHandlers

WORDS = ["train", *SETTINGS]
USR1, TERM = str(int(signal.SIGUSR1)), str(int(signal.SIGTERM))


def test_a_stop_counts_if_a_library_replaces_its_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """matplotlib's compiled code replaces exceptions raised while it converts its arguments."""

    def draw(*_: object, **__: object) -> None:
        with suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        raise ValueError("Invalid bounding box")

    monkeypatch.setattr("cifar_lit.train.page_of", draw)
    answer = run_here([*WORDS, "--epochs", "1"], tmp_path)
    assert answer.code == 143 and "cifar-lit: stopped. Resume with:" in answer.err and "Invalid" not in answer.err
    monkeypatch.undo()
    assert run_here(["train", "--resume", "--trust"], tmp_path).code == 0


def test_a_failed_requeue_prints_the_command_to_resume(tmp_path: Path) -> None:
    array = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}
    path = scontrol(tmp_path / "bin", "echo no permission >&2; exit 1")
    answer = run_here(WORDS, tmp_path, **SLURM, **array, PATH=path, AT_STEP="3", AT_STEP_SIGNAL=USR1)
    assert answer.code == 138
    assert "`scontrol requeue 5_2` failed: no permission. Resume with:\n  cifar-lit train --resume" in answer.err


@pytest.mark.parametrize(("moment", "step"), [({"AT_STEP": "3", **SLURM}, 4), ({"AT_STEP": "start"}, None)])
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


def test_lightnings_signal_handlers_are_not_registered() -> None:
    trainer = Trainer(accelerator="cpu", logger=False, barebones=True)
    assert callable(trainer._signal_connector.register_signal_handlers)  # private: a release may rename it
    before = signal.getsignal(signal.SIGTERM)
    with undone():
        NoSignalHandlers().setup(trainer, torch.nn.Module(), "test")  # type: ignore[arg-type]
        trainer._signal_connector.register_signal_handlers()
        assert signal.getsignal(signal.SIGTERM) == before
