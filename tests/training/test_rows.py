"""Rows of the training curves."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import BATCHES, Rows, best_and_last, broken_data, classifier, fitted, shapes_data, stop_at

from cifar_lit.training.callbacks import Clock, EpochLines
from cifar_lit.training.checkpoint import read_checkpoint
from cifar_lit.training.classifier import ImageClassifier
from cifar_lit.training.orderly_stop import Interrupted, OrderlyStop
from cifar_lit.training.rows import NotFiniteLoss


@pytest.mark.parametrize("on_host", [True, False], ids=["CPU", "accelerator"])
@pytest.mark.parametrize("step", [0, 6, 7, 12])
def test_a_non_finite_loss_ends_the_fit_before_a_checkpoint(
    step: int, on_host: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An accelerator is read when a row is logged or a checkpoint is written."""
    last = best_and_last(tmp_path)[1]
    last.MIN_INTERVAL = 0.0  # type: ignore[attr-defined]
    if not on_host:
        monkeypatch.setattr(ImageClassifier, "_check_loss", lambda *_: None)
    logged = Rows()
    with pytest.raises(NotFiniteLoss, match="the loss is nan at step" if on_host else "a loss is not finite in steps"):
        fitted(classifier(), broken_data(step), last, logger=logged, log_every_n_steps=3, max_epochs=3)
    epochs = {read_checkpoint(path)["epoch"] for path in tmp_path.iterdir()}
    assert epochs == (set() if step < BATCHES else {0})
    assert max(logged.curve("train/loss"), default=0) <= step


@pytest.mark.parametrize("stop", [3, 7, 8, 10])
def test_a_resumed_run_logs_each_row_once(stop: int, tmp_path: Path) -> None:
    def run(resume: Path | None = None, stop: int = -1) -> list[Any]:
        logged, last = Rows(), best_and_last(tmp_path)[1]
        orderly = OrderlyStop(last)  # type: ignore[arg-type]
        settings: dict[str, Any] = {"limit_val_batches": 0, "log_every_n_steps": 3, "max_epochs": 3}
        with suppress(Interrupted):
            callbacks = [last, stop_at(orderly, stop), orderly]
            fitted(classifier(), shapes_data(), *callbacks, resume=resume, logger=logged, **settings)
        return logged.rows

    expected = run()
    first = run(stop=stop)
    middle = (tmp_path / "last.ckpt").rename(tmp_path / "middle.ckpt")
    assert first + run(middle) == expected


@pytest.mark.parametrize("logs", [False, True])
def test_a_training_step_of_a_subclass_has_the_values_that_it_logs_and_no_zeros(
    logs: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    class Own(ImageClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            images, labels = batch
            loss = torch.nn.functional.cross_entropy(self(images), labels)
            if logs:
                self.log("train/loss", loss * 0 + 1.25)
            return loss

    logged, clock = Rows(), Clock()
    done = fitted(Own(net="shapenet"), shapes_data(), clock, EpochLines(clock), logger=logged, log_every_n_steps=3)
    names = {"train/loss"} if logs else set()
    assert {name for name in done.callback_metrics if name.startswith("train/")} == names
    assert {name for row in logged.rows for name in row[1] if name.startswith("train/")} == names
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == done.current_epoch and all(("train loss 1.2500 · val" in line) == logs for line in lines)
    assert not any("acc 0.0000" in line or "nan" in line for line in lines)
