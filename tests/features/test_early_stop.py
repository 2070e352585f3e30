"""Early stopping, in an uninterrupted and in a resumed run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_runs import BATCHES, At, best_and_last, classifier, fitted, shapes_data

from cifar_lit.features.early_stop import EarlyStop
from cifar_lit.features.finetune import Finetune

STILL = 1e-12  # a learning rate that changes no validation score


# The first of the six epochs always counts as an improvement.
@pytest.mark.parametrize(("patience", "epochs"), [(2, 3), (0.4, 4), (10, 6)])
def test_training_ends_after_patience_epochs_or_that_share_of_all_epochs(patience: float, epochs: int) -> None:
    done = fitted(classifier(lr=STILL), shapes_data(), EarlyStop(patience), max_epochs=6)
    assert done.global_step == epochs * BATCHES


def test_patience_refers_to_the_monitored_score() -> None:
    for lr, epochs in ((0.02, 4), (STILL, 2)):  # with the first, the loss falls in every epoch
        model = classifier(lr=lr, monitor="loss")
        assert fitted(model, shapes_data(), EarlyStop(1), max_epochs=4).global_step == epochs * BATCHES


def test_a_resumed_run_continues_the_count_with_its_own_patience(tmp_path: Path) -> None:
    save = At(2 * BATCHES + 3, lambda trainer, _: trainer.save_checkpoint(tmp_path / "a.ckpt"), after=True)
    fitted(classifier(lr=STILL), shapes_data(), EarlyStop(3), save, max_epochs=6)
    for given, epochs in (([EarlyStop(3)], 4), ([EarlyStop(4)], 5), ([], 6)):
        done = fitted(classifier(lr=STILL), shapes_data(), *given, resume=tmp_path / "a.ckpt", max_epochs=6)
        assert done.global_step == epochs * BATCHES


def test_the_score_of_a_fitted_head_is_the_first_to_improve_on(tmp_path: Path) -> None:
    model, data = classifier(net="shapenet", lr=STILL), shapes_data(cache_dir=str(tmp_path))
    torch.save(model.net.state_dict(), tmp_path / "weights.pth")
    features = [Finetune(str(tmp_path / "weights.pth")), EarlyStop(0.5)]
    done = fitted(model, data, *features, *best_and_last(tmp_path), max_epochs=4)
    assert done.global_step == 2 * BATCHES
