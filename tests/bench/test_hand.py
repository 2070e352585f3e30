"""A recipe's whole training by hand comes to what the Trainer's comes to."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback
from small_subjects import small_subject

from cifar_lit.bench.curve import accuracy_of, undisturbed
from cifar_lit.bench.hand import WholeLoop
from cifar_lit.bench.training import fit

MODEL = {
    "net": "whitened",
    "net_options": {"widths": [16, 32]},
    "optimizer": "muon",
    "lr": 0.2,
    "momentum": 0.6,
    "nesterov": True,
    "bias_lr": 1.0,
    "head_lr": 10.0,
    "schedule": "triangular",
}


class AtEnd(Callback):
    """Tests the net at the end of the Trainer's training."""

    accuracy = float("nan")

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        with undisturbed(trainer, pl_module):
            self.accuracy = accuracy_of(trainer, pl_module, trainer.datamodule.test_dataloader())  # type: ignore[attr-defined]


def test_a_whole_training_by_hand_scores_as_the_trainers_does() -> None:
    by_hand, by_trainer = WholeLoop(), AtEnd()
    fit(small_subject(MODEL, {"count": 600}), by_hand, max_epochs=3)
    fit(small_subject(MODEL, {"count": 600}), by_trainer, max_epochs=3)
    assert by_hand.accuracy == pytest.approx(by_trainer.accuracy, abs=0.02)  # of 120 images, two may fall the other way
    assert by_trainer.accuracy > 0.15  # chance is 0.1
    assert by_hand.seconds > 0
