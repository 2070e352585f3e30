"""model.swa_from: the mean of the weights at the ends of the last epochs is validated, saved and tested."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from small_runs import assert_close, best_and_last, classifier, fitted, same, shapes_data, trainer, weights
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from cifar_lit.errors import UsageError
from cifar_lit.training.checkpoint import read_checkpoint
from cifar_lit.training.metrics import Score

FIVE: dict[str, Any] = {"max_epochs": 5}


def is_statistic(name: str) -> bool:
    return "running_" in name or "num_batches" in name


def test_the_mean_over_the_last_epochs_is_validated_saved_and_tested(tmp_path: Path) -> None:
    """The current weights follow the same path as without an average, under the same schedule."""
    ends: list[dict[str, Tensor]] = []
    settings: dict[str, Any] = {"net": "shapenet", "momentum": 0.9, "schedule": "one_cycle"}
    seen = LambdaCallback(on_train_epoch_end=lambda _, model: ends.append(weights(model)))
    fitted(classifier(**settings), shapes_data(), seen, **FIVE)

    last, data, model = best_and_last(tmp_path)[1], shapes_data(), classifier(**settings, swa_from=0.6)
    done = fitted(model, data, last, **FIVE)
    checkpoint = read_checkpoint(tmp_path / "last.ckpt")
    assert same(checkpoint["current_model_state"], ends[4])
    expected = {name: torch.stack([end[name] for end in ends[2:]]).mean(0) for name in ends[0] if "num" not in name}
    trained = {name: values for name, values in expected.items() if not is_statistic(name)}
    assert_close({name: checkpoint["state_dict"][name] for name in trained}, trained)
    assert same(weights(model), checkpoint["state_dict"])

    plain = classifier(net="shapenet")
    plain.load_state_dict(checkpoint["state_dict"])
    tested = done.test(model, datamodule=data, verbose=False)
    assert tested == trainer().test(plain, datamodule=data, verbose=False)
    trainer().validate(plain, datamodule=data, verbose=False)
    assert Score.from_dict(checkpoint["cifar_lit"]["score"], 10) == plain.score is not None


@pytest.mark.parametrize(
    ("hook", "precision"),
    [("on_validation_end", "32-true"), ("on_train_epoch_end", "32-true"), ("on_train_epoch_end", "64-true")],
)
def test_a_run_resumes_bit_equal_from_the_end_of_an_averaged_epoch(hook: str, precision: Any, tmp_path: Path) -> None:
    """The epoch is included once, whether its validation or its end was saved."""

    def save(trainer: Any, _: Any) -> None:
        trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    settings: dict[str, Any] = {"net": "shapenet", "momentum": 0.9, "schedule": "cosine", "swa_from": 0.6}
    whole = classifier(**settings)
    fitted(whole, shapes_data(), LambdaCallback(**{hook: save}), precision=precision, **FIVE)  # type: ignore[arg-type]
    for epoch in (2, 3):
        model = classifier(**settings)
        fitted(model, shapes_data(), resume=tmp_path / f"{epoch}.ckpt", precision=precision, **FIVE)
        assert same(weights(model), weights(whole))


def test_norms_of_the_average_have_the_statistics_of_the_training_images(tmp_path: Path) -> None:
    model, data = classifier(net="shapenet", swa_from=0.6), shapes_data(batch_size=99)
    fitted(model, data, best_and_last(tmp_path)[1], **FIVE)
    inputs: list[Tensor] = []
    model.net[1].register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))  # type: ignore[index]
    model.net.eval()
    for images in data.plain_images(100).split(50):
        model(images)
    norm: Any = model.net[1]  # type: ignore[index]
    means, variances = zip(
        *((maps.mean((0, 2, 3)), maps.transpose(0, 1).flatten(1).var(1)) for maps in inputs), strict=True
    )
    torch.testing.assert_close(norm.running_mean, torch.stack(means).mean(0))
    torch.testing.assert_close(norm.running_var, torch.stack(variances).mean(0))


def test_fixed_norms_stay_fixed() -> None:
    model = classifier(net="shapenet", swa_from=0.5, fixed_norms=True)
    before = weights(model)
    fitted(model, shapes_data())
    after = weights(model)
    assert all(torch.equal(after[name], before[name]) for name in before if is_statistic(name))
    assert not same(after, before)


def test_a_training_that_ends_before_the_average_starts_keeps_its_weights(tmp_path: Path) -> None:
    whole, stopped = classifier(net="shapenet"), classifier(net="shapenet", swa_from=0.6)
    fitted(whole, shapes_data(), max_epochs=1)
    stop = LambdaCallback(on_validation_end=lambda trainer, _: setattr(trainer, "should_stop", True))
    fitted(stopped, shapes_data(), stop, best_and_last(tmp_path)[1], **FIVE)
    assert same(weights(stopped), weights(whole))
    assert same(read_checkpoint(tmp_path / "last.ckpt")["state_dict"], weights(whole))


def test_the_average_works_with_a_plain_loader_and_a_limit_of_steps() -> None:
    images = torch.randn(40, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(images, torch.arange(40) % 10), 8)
    model = classifier(net="shapenet", swa_from=0.5)
    trainer(max_epochs=4, max_steps=13).fit(model, loader)  # averages after 10 and 13 steps
    assert int(model.net[1].num_batches_tracked) == 5  # type: ignore[index]


def test_invalid_averages_are_refused() -> None:
    for settings, fault in (
        ({"swa_from": 1.0}, "model.swa_from is a share of the epochs"),
        ({"swa_from": 0.5, "ema_decay": 0.9}, "both average the weights"),
    ):
        with pytest.raises(UsageError, match=fault):
            classifier(**settings)
    with pytest.raises(UsageError, match=r"model\.swa_from is a share of the epochs: set --epochs"):
        loader = DataLoader(TensorDataset(torch.zeros(4, 3, 16, 16), torch.arange(4)))
        trainer(max_epochs=-1).fit(classifier(swa_from=0.5), loader)
