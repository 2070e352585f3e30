"""The weight average follows its formula, and is the one that is validated, saved and tested."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from small_runs import assert_close, best_and_last, classifier, fitted, same, shapes_data, trainer, weights
from torch import Tensor

from cifar_lit.base.errors import UsageError
from cifar_lit.features.weight_average import WeightAverage
from cifar_lit.training.checkpoint import read_checkpoint
from cifar_lit.training.score import Score


def test_the_average_is_validated_saved_and_tested(tmp_path: Path) -> None:
    average: dict[str, Tensor] = {}

    def follow(trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        for name, now in weights(pl_module).items():
            average[name] = 0.9 * average[name] + 0.1 * now if name in average else now

    best, data, model = best_and_last(tmp_path)[0], shapes_data(), classifier(net="shapenet")
    done = fitted(model, data, LambdaCallback(on_train_batch_end=follow), WeightAverage(0.9), best, max_epochs=1)
    checkpoint = read_checkpoint(tmp_path / "best.ckpt")
    averages = {name: values for name, values in average.items() if "num_batches_tracked" not in name}  # integers
    assert_close({name: checkpoint["state_dict"][name] for name in averages}, averages, rtol=1e-4)
    assert same(weights(model), checkpoint["state_dict"])
    assert not same(checkpoint["state_dict"], checkpoint["current_model_state"])

    plain = classifier(net="shapenet")
    plain.load_state_dict(checkpoint["state_dict"])
    trainer().validate(plain, datamodule=data, verbose=False)
    saved = checkpoint["cifar_lit"]["score"]
    assert Score.from_dict(saved) == plain.score is not None
    tested = done.test(model, datamodule=data, verbose=False)
    assert same(weights(model), checkpoint["state_dict"])
    assert tested == trainer().test(plain, datamodule=data, verbose=False)


def test_the_average_has_the_precision_of_the_weights(tmp_path: Path) -> None:
    model, last = classifier(net="shapenet"), best_and_last(tmp_path)[1]
    fitted(model, shapes_data(), WeightAverage(0.9), last, max_epochs=1, precision="64-true")
    averages = read_checkpoint(tmp_path / "last.ckpt")["state_dict"]
    assert {tensor.dtype for tensor in averages.values()} == {torch.float64, torch.int64}
    assert next(model.parameters()).dtype == torch.float64


def test_a_test_scores_the_weights_of_the_checkpoint_or_else_of_the_model(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Neither the average nor the last weights of the fit replace them, also in repeated evaluations."""
    data, model = shapes_data(), classifier(net="shapenet", lr=0.3)
    done = fitted(model, data, WeightAverage(0.95), best_and_last(tmp_path)[1])
    done.test(model, datamodule=data, ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert same(weights(model), read_checkpoint(tmp_path / "last.ckpt")["state_dict"])
    for parameter in model.net.parameters():
        parameter.data.zero_()
    for _ in range(2):
        done.validate(model, datamodule=data, verbose=False)
        assert model.predictions is not None
        assert torch.allclose(model.predictions["probabilities"], torch.tensor(0.1, dtype=torch.float64))
    assert not [warning for warning in recwarn if "WeightAveraging" in str(warning.message)]


def test_resume_cannot_add_the_average(tmp_path: Path) -> None:
    fitted(classifier(), shapes_data(), best_and_last(tmp_path)[1], max_epochs=1)
    with pytest.raises(UsageError, match="weight_average"):
        fitted(classifier(), shapes_data(), WeightAverage(0.9), resume=tmp_path / "last.ckpt", max_epochs=1)
