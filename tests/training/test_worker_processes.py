"""Fits in processes that Lightning forks, as in a notebook, leave their net in the main process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import BATCHES, same, shapes_data, trainer, weights

from cifar_lit import ImageClassifier
from cifar_lit.base.errors import UsageError
from cifar_lit.features.finetune import Finetune

FORKED: dict[str, Any] = {"devices": 2, "strategy": "ddp_notebook", "plugins": []}


def unbuilt(**settings: Any) -> ImageClassifier:
    return ImageClassifier(**{"net": "lenet", "lr": 0.05, **settings})


def test_trained_weights_come_back_from_the_workers(tmp_path: Path) -> None:
    torch.save(ImageClassifier(net="lenet", input_shape=[3, 16, 16], num_classes=10).net.state_dict(), tmp_path / "net")
    model, data, weights_only = unbuilt(), shapes_data(), Finetune(str(tmp_path / "net"), head_views=0)
    fit = trainer(weights_only, **FORKED, max_epochs=1)
    fit.fit(model, data)
    trained = weights(model)
    fit.save_checkpoint(tmp_path / "last.ckpt")
    [scores] = trainer().validate(model, data, verbose=False)
    assert scores["val/loss"] == pytest.approx(float(fit.callback_metrics["val/loss"]), abs=1e-5)
    assert same(weights(ImageClassifier.load_from_checkpoint(tmp_path / "last.ckpt")), trained)


def check_threads() -> None:
    assert torch.get_num_threads() == 1, "a fork has none of the OpenMP threads of its parent, and would wait for them"


@pytest.mark.parametrize("act", ["validate", "test", "predict"])
def test_other_stages_also_build_the_net_before_the_workers_start(act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, threads = unbuilt(), torch.get_num_threads()
    monkeypatch.setattr(model, "setup", lambda stage: check_threads())
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # else Lightning may choose one itself
    try:
        torch.set_num_threads(2)
        getattr(trainer(**FORKED), act)(model, shapes_data())
    finally:
        torch.set_num_threads(threads)
    assert model.hparams["num_classes"] == 10 and any(True for _ in model.net.parameters())


def test_data_of_unknown_classes_are_refused_before_the_workers_start() -> None:
    loader = torch.utils.data.DataLoader([(torch.rand(3, 16, 16), 0)] * BATCHES)
    with pytest.raises(UsageError, match="the number of classes is unknown"):
        trainer(**FORKED).fit(unbuilt(), loader)
