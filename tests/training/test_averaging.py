from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from small_runs import assert_close, best_and_last, classifier, fitted, same, shapes_data, trainer, weights
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.training.callbacks import WeightAverage
from cifar_lit.training.checkpoint import read_checkpoint
from cifar_lit.training.classifier import ImageClassifier


class Average(Callback):
    """The average by the formula, from the weights after every step."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.values: dict[str, Tensor] = {}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for name, now in weights(pl_module).items():
            if name not in self.values:
                self.values[name] = now
            else:
                self.values[name] = self.decay * self.values[name] + (1 - self.decay) * now


def test_the_saved_validated_kept_and_tested_weights_are_the_average(tmp_path: Path) -> None:
    average, (best, _) = Average(0.9), best_and_last(tmp_path)
    data, model = shapes_data(), classifier(net="shapenet", ema_decay=0.9)
    done = fitted(model, data, average, best, enable_checkpointing=True, max_epochs=1)
    checkpoint = read_checkpoint(tmp_path / "best.ckpt")
    averages = {name: values for name, values in average.values.items() if "num_batches_tracked" not in name}  # rounded down
    assert_close({name: checkpoint["state_dict"][name] for name in averages}, averages, rtol=1e-4)
    assert same(weights(model), checkpoint["state_dict"])
    assert not same(checkpoint["state_dict"], checkpoint["current_model_state"])

    plain = classifier(net="shapenet")
    plain.load_state_dict(checkpoint["state_dict"])
    images = (data.train_images.images[data.split[1]].permute(0, 3, 1, 2) / 255 - 0.5) / 0.25
    logits, labels = plain.eval()(images), data.train_images.labels[data.split[1]]
    score = checkpoint["cifar_lit"]["score"]
    assert score["accuracy"] == float((logits.argmax(1) == labels).double().mean())
    assert abs(score["loss"] - float(F.cross_entropy(logits, labels).detach())) < 1e-4

    tested = done.test(model, datamodule=data, verbose=False)
    assert same(weights(model), checkpoint["state_dict"])
    assert tested == trainer().test(plain, datamodule=data, verbose=False)


def averaged(by_trainer: bool) -> tuple[ImageClassifier, list[Callback]]:
    """A model whose weights are averaged, and callbacks for its fit.

    As a setting of the model the callback is a new one in each stage; given to the Trainer, it still has the fit's weights.
    """
    model = classifier(net="shapenet", lr=0.3, ema_decay=0.0 if by_trainer else 0.95)
    return model, [WeightAverage(0.95)] if by_trainer else []


@pytest.mark.parametrize("by_trainer", [False, True])
def test_a_test_of_a_checkpoint_in_the_process_that_trained_uses_the_average(
    by_trainer: bool, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    data, (model, callbacks) = shapes_data(), averaged(by_trainer)
    done = fitted(model, data, *callbacks, best_and_last(tmp_path)[1], enable_checkpointing=True)
    done.test(model, datamodule=data, ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert same(weights(model), read_checkpoint(tmp_path / "last.ckpt")["state_dict"])
    assert not [warning for warning in recwarn if "WeightAveraging" in str(warning.message)]


@pytest.mark.parametrize("by_trainer", [False, True])
def test_weights_that_are_scored_after_the_fit_are_those_in_the_model(by_trainer: bool) -> None:
    """Neither the average nor the last weights of the fit take their place, however often they are scored."""
    data, (model, callbacks) = shapes_data(count=100), averaged(by_trainer)
    done = fitted(model, data, *callbacks, max_epochs=1)
    for parameter in model.net.parameters():
        parameter.data.zero_()
    for _ in range(2):
        done.validate(model, datamodule=data, verbose=False)
        assert model.predictions is not None
        assert torch.allclose(model.predictions["probabilities"], torch.tensor(0.1, dtype=torch.float64))


@pytest.mark.parametrize("ema_decay", [0.0, 0.9])
def test_a_run_without_an_average_goes_on_with_one_and_the_other_way_round(
    ema_decay: float, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    before, model = classifier(net="shapenet", ema_decay=ema_decay), classifier(net="shapenet", ema_decay=0.9 - ema_decay)
    fitted(before, shapes_data(), max_epochs=1).save_checkpoint(tmp_path / "own.ckpt")
    done = fitted(model, shapes_data(), resume=tmp_path / "own.ckpt", max_epochs=2)
    averages = [callback for callback in done.callbacks if isinstance(callback, WeightAverage)]  # type: ignore[attr-defined]
    assert (done.global_step, len(averages)) == (14, 0 if ema_decay else 1)
    assert not [warning for warning in recwarn if "WeightAveraging" in str(warning.message)]
