"""Early stopping, in an uninterrupted and in a resumed run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from safetensors.torch import save_file
from small_runs import BATCHES, At, best_and_last, classifier, fitted, shapes_data

from cifar_lit.errors import UsageError
from cifar_lit.models.registry import build_net
from cifar_lit.training.classifier import ImageClassifier

STILL = 1e-12  # a learning rate that changes no validation score


# The first of the six epochs always counts as an improvement.
@pytest.mark.parametrize(("patience", "epochs"), [(0, 6), (2, 3), (0.4, 4), (10, 6)])
def test_training_ends_after_patience_epochs_or_that_share_of_all_epochs(patience: float, epochs: int) -> None:
    done = fitted(classifier(lr=STILL, patience=patience), shapes_data(), max_epochs=6)
    assert done.global_step == epochs * BATCHES


def test_patience_refers_to_the_monitored_score() -> None:
    model = classifier(lr=0.02, monitor="loss", patience=1)  # the loss falls in every epoch
    assert fitted(model, shapes_data(), max_epochs=4).global_step == 4 * BATCHES
    model = classifier(lr=STILL, monitor="loss", patience=1)
    assert fitted(model, shapes_data(), max_epochs=4).global_step == 2 * BATCHES


def test_a_users_early_stopping_replaces_ours() -> None:
    own = EarlyStopping("val/accuracy", mode="max", patience=3)
    done = fitted(classifier(lr=STILL, patience=1), shapes_data(), own, max_epochs=6)
    assert done.global_step == 4 * BATCHES and own.wait_count == 3


def test_a_resumed_run_continues_the_count_with_its_own_patience(tmp_path: Path) -> None:
    def save() -> At:
        return At(2 * BATCHES + 3, lambda trainer, _: trainer.save_checkpoint(tmp_path / "a.ckpt"), after=True)

    fitted(classifier(lr=STILL, patience=3), shapes_data(), save(), max_epochs=6)
    for patience, epochs in ((3, 4), (4, 5), (0, 6)):
        done = fitted(classifier(lr=STILL, patience=patience), shapes_data(), resume=tmp_path / "a.ckpt", max_epochs=6)
        assert done.global_step == epochs * BATCHES


def test_the_score_of_a_fitted_head_is_the_first_to_improve_on(tmp_path: Path) -> None:
    torch.manual_seed(1)
    net = build_net("shapenet", channels=3, image_size=16, num_classes=10)
    save_file(net.state_dict(), tmp_path / "weights.safetensors")
    settings = {"optimizer": "adamw", "lr": STILL, "weights": str(tmp_path / "weights.safetensors"), "head_views": 1}
    model = ImageClassifier("shapenet", [3, 16, 16], 10, **settings, patience=0.5)
    done = fitted(model, shapes_data(cache_dir=str(tmp_path)), *best_and_last(tmp_path), max_epochs=4)
    assert done.global_step == 2 * BATCHES


def test_without_validation_images_training_runs_to_the_end() -> None:
    data = shapes_data(val_size=0)
    assert fitted(classifier(patience=1), data, max_epochs=3, limit_val_batches=0).current_epoch == 3


def test_a_negative_patience_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"model\.patience is a number of validations, or below 1 a share of them, not -1"
    ):
        classifier(patience=-1.0)
