"""A plain Trainer resumes with the split and the settings of the checkpoint, or refuses with their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from small_runs import BATCHES, MOMENTUM, At, best_and_last, classifier, fitted, same, shapes_data, weights

from cifar_lit.base.errors import UsageError
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.settings import Split
from cifar_lit.features.early_stop import EarlyStop
from cifar_lit.features.resolutions import Resolutions
from cifar_lit.features.skip_easy import SkipEasy
from cifar_lit.features.weight_average import WeightAverage
from cifar_lit.training.classifier import ImageClassifier


def save_noise(root: Path, start: int, end: int) -> None:
    """Save images of random pixels, alternately of two classes."""
    for seed in range(start, end):
        path = root / "ab"[seed % 2] / f"{seed:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(seed).integers(0, 256, (16, 16, 3), np.uint8)).save(path)


def middle_of(folder: Path, data: Any, **settings: Any) -> Path:
    """Train `data` with a checkpoint in the second of three epochs, and return its path."""
    path = folder / "middle.ckpt"
    save = At(BATCHES + 2, lambda trainer, _: trainer.save_checkpoint(path), after=True)
    fitted(classifier(**settings), data, save, max_epochs=3)
    return path


def test_images_added_to_the_folder_change_nothing(tmp_path: Path) -> None:
    """The net is built for the classes of the folder, before the checkpoint is read."""

    def fit(resume: Path | None = None, *callbacks: Any) -> dict[str, Any]:
        data = ImageData("folder", str(tmp_path / "noise"), 8, loading={"cache_dir": str(tmp_path / "cache")})
        model = ImageClassifier("lenet", lr=0.05, schedule="cosine")
        fitted(model, data, SkipEasy(0.3, 0.3), *callbacks, resume=resume, max_epochs=3)
        return weights(model)

    save_noise(tmp_path / "noise", 0, 60)
    path = tmp_path / "middle.ckpt"
    whole = fit(None, At(8, lambda trainer, _: trainer.save_checkpoint(path), after=True))
    save_noise(tmp_path / "noise", 60, 90)
    assert same(fit(path), whole)


def test_settings_of_the_data_are_refused_in_a_fit_and_not_in_a_test(tmp_path: Path) -> None:
    path = middle_of(tmp_path, shapes_data())
    other = shapes_data(split=Split(seed=1))
    with pytest.raises(UsageError, match=r"data\.split\.seed was 0 in this run, not 1"):
        fitted(classifier(), other, resume=path, max_epochs=3)
    tester = fitted(classifier(), shapes_data(), max_epochs=1)
    assert tester.test(classifier(), datamodule=other, ckpt_path=path, weights_only=True, verbose=False)


def test_a_longer_training_equals_one_that_was_as_long_from_the_start(tmp_path: Path) -> None:
    settings = {**MOMENTUM, "schedule_options": {"warmup_epochs": 1.0}, "net": "shapenet"}
    last, resume = best_and_last(tmp_path)[1], tmp_path / "last.ckpt"
    fitted(classifier(**settings), shapes_data(), WeightAverage(0.9), last, max_epochs=3)
    fitted(longer := classifier(**settings), shapes_data(), WeightAverage(0.9), resume=resume, max_epochs=5)
    fitted(whole := classifier(**settings), shapes_data(), WeightAverage(0.9), max_epochs=5)
    assert same(weights(longer), weights(whole))


@pytest.mark.parametrize("feature", [EarlyStop(0.5), SkipEasy(0.2), Resolutions({8: 0.5})])
def test_a_training_is_not_prolonged_if_a_feature_depends_on_its_length(feature: Any, tmp_path: Path) -> None:
    path = middle_of(tmp_path, shapes_data(), net="shapenet")
    with pytest.raises(UsageError, match=r"(early_stop|skip_easy|resolutions) depends on the length"):
        fitted(classifier(net="shapenet"), shapes_data(), feature, resume=path, max_epochs=5)


def test_what_does_not_change_the_training_may_change_and_is_recorded_once(tmp_path: Path) -> None:
    path, later = middle_of(tmp_path, shapes_data()), tmp_path / "later.ckpt"
    save = At(2 * BATCHES + 1, lambda trainer, _: trainer.save_checkpoint(later), after=True)
    settings: dict[str, Any] = {"max_epochs": 3, "log_every_n_steps": 1}
    fitted(classifier(), shapes_data(workers=1), EarlyStop(3), save, resume=path, **settings)
    model = classifier()
    fitted(model, shapes_data(workers=1, placement="host"), resume=later, **settings)
    assert [list(change["settings"].items()) for change in model.changes] == [
        [("data.loading.workers", 1)],
        [("data.loading.placement", "host")],
    ]
    assert [change["step"] for change in model.changes] == [BATCHES + 2, 2 * BATCHES + 1]
