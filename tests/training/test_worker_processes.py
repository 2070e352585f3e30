"""Fits in processes that Lightning forks, as in a notebook, leave their net in the main process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import classifier, same, shapes_data, trainer, weights

from cifar_lit import ImageClassifier

FORKED: dict[str, Any] = {"devices": 2, "strategy": "ddp_notebook", "plugins": []}


def test_trained_weights_come_back_from_the_workers(tmp_path: Path) -> None:
    model, data = classifier(), shapes_data()
    fit = trainer(**FORKED, max_epochs=1)
    fit.fit(model, data)
    fit.save_checkpoint(tmp_path / "last.ckpt")
    [scores] = trainer().validate(model, data, verbose=False)
    assert scores["val/loss"] == pytest.approx(float(fit.callback_metrics["val/loss"]), abs=1e-5)
    assert same(weights(ImageClassifier.load_from_checkpoint(tmp_path / "last.ckpt")), weights(model))


def test_a_net_that_is_not_built_yet_is_refused() -> None:
    with pytest.raises(Exception, match=r"use ImageClassifier\(num_classes=data\.class_count"):
        trainer(**FORKED).fit(ImageClassifier("lenet"), shapes_data())


def test_workers_compute_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork has none of the OpenMP threads of its parent, and would wait for them."""
    model, threads = classifier(), torch.get_num_threads()
    real = model.setup

    def setup(stage: str) -> None:
        assert torch.get_num_threads() == 1
        real(stage)

    monkeypatch.setattr(model, "setup", setup)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # else Lightning may choose one itself
    try:
        torch.set_num_threads(2)
        trainer(**FORKED).validate(model, shapes_data())
    finally:
        torch.set_num_threads(threads)
