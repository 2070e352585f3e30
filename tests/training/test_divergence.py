"""Losses that rise are told; weights that are not finite reach neither best nor last, and not their average."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from small_runs import BATCHES, At, best_and_last, classifier, fitted, shapes_data

from cifar_lit.training.callbacks import DivergenceWarning, NotFiniteLoss
from cifar_lit.training.checkpoint import read_checkpoint


def blow_up(trainer: pl.Trainer, model: Any) -> None:
    for group in trainer.optimizers[0].param_groups:
        group["lr"] = 30.0


@pytest.mark.parametrize("diverges", [True, False])
def test_a_loss_far_above_its_start_is_told_once_with_what_to_do(diverges: bool, capsys: pytest.CaptureFixture[str]) -> None:
    callbacks = [DivergenceWarning(), *([At(2, blow_up, after=True)] if diverges else [])]
    with suppress(NotFiniteLoss):
        fitted(classifier(), shapes_data(), *callbacks, max_epochs=3, log_every_n_steps=1)
    lines = [line for line in capsys.readouterr().err.splitlines() if "diverges" in line]
    assert len(lines) == diverges
    assert all("far above its start" in line and "lower --lr" in line for line in lines)


def test_an_infinite_loss_is_not_finite_either() -> None:
    """As of a class that the net rules out: the loss is no NaN, and the weights are finite."""
    model = classifier()
    model.net[-1].bias.data[1:] = -3e38  # type: ignore[index, union-attr, operator]
    with pytest.raises(NotFiniteLoss, match=r"^the loss is inf at step 0 of epoch 0$"):
        fitted(model, shapes_data())


def poison(trainer: pl.Trainer, model: Any) -> None:
    """As a last update would that overflows: the loss before it was finite."""
    with torch.no_grad():
        next(iter(model.net.parameters()))[0, 0, 0, 0] = math.inf


@pytest.mark.parametrize("ema_decay", [0.0, 0.9])
@pytest.mark.parametrize("validates", [True, False])
def test_weights_that_overflow_with_the_last_step_of_an_epoch_reach_no_checkpoint(
    tmp_path: Path, ema_decay: float, validates: bool
) -> None:
    best, last = best_and_last(tmp_path)
    kept, limits = ([best, last], {}) if validates else ([last], {"limit_val_batches": 0})
    with pytest.raises(NotFiniteLoss, match=r"no longer finite at step \d+ of epoch 1|the loss is"):
        fitted(
            classifier(ema_decay=ema_decay),
            shapes_data(),
            At(2 * BATCHES, poison, after=True),
            *kept,
            enable_checkpointing=True,
            max_epochs=3,
            **limits,
        )
    for path in tmp_path.glob("*.ckpt"):
        checkpoint = read_checkpoint(path)
        assert checkpoint["epoch"] == 0
        assert all(tensor.isfinite().all() for tensor in checkpoint["state_dict"].values())
    assert (tmp_path / "last.ckpt").exists()
