"""Rows of the training curves."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import BATCHES, Rows, best_and_last, broken_data, classifier, fitted, shapes_data, stop_at

from cifar_lit.training.checkpoint import read_checkpoint
from cifar_lit.training.checks import NotFiniteLoss
from cifar_lit.training.classifier import ImageClassifier
from cifar_lit.training.orderly_stop import Interrupted, OrderlyStop


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"log_every_n_steps": 1000}, [7, 14, 21]),
        ({"log_every_n_steps": 3}, [3, 6, 7, 10, 13, 14, 17, 20, 21]),
        ({"log_every_n_steps": 4, "max_steps": 17}, [4, 7, 11, 14, 17]),
        ({"log_every_n_steps": 2, "accumulate_grad_batches": 2}, [2, 4, 6, 8, 10, 12]),
    ],
)
def test_rows_are_logged_at_intervals_and_at_the_end_of_epochs(settings: dict[str, Any], steps: list[int]) -> None:
    logged = Rows()
    fitted(classifier(), shapes_data(), logger=logged, max_epochs=3, limit_val_batches=0, **settings)
    assert list(logged.curve("train/loss")) == steps
    assert set(logged.curve("weight_norm")) == {4, 8, 12} if 8 in steps else {7, 14, 21} & set(steps)


def test_a_row_has_the_means_of_the_images_since_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, logged, losses = classifier(), Rows(), list[tuple[float, int]]()
    step = ImageClassifier.training_step

    def recorded(module: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = step(module, batch, batch_idx)
        losses.append((float(loss), len(batch.labels)))
        return loss

    monkeypatch.setattr(ImageClassifier, "training_step", recorded)
    fitted(model, shapes_data(), logger=logged, max_epochs=1, log_every_n_steps=4)
    for value, part in zip(logged.curve("train/loss").values(), (losses[:4], losses[4:]), strict=True):
        images = sum(count for _, count in part)
        assert value == pytest.approx(sum(loss * count for loss, count in part) / images, rel=1e-5)


@pytest.mark.parametrize("on_host", [True, False], ids=["CPU", "accelerator"])
@pytest.mark.parametrize("step", [0, 6, 7, 12])
def test_a_non_finite_loss_ends_the_fit_before_a_checkpoint(
    step: int, on_host: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An accelerator is read when a row is logged or a checkpoint is written."""
    last = best_and_last(tmp_path)[1]
    last.MIN_INTERVAL = 0.0  # type: ignore[attr-defined]
    if not on_host:
        monkeypatch.setattr(ImageClassifier, "_check_loss", lambda *_: None)
    logged = Rows()
    with pytest.raises(NotFiniteLoss, match="the loss is nan at step" if on_host else "a loss is not finite in steps"):
        fitted(classifier(), broken_data(step), last, logger=logged, log_every_n_steps=3, max_epochs=3)
    epochs = {read_checkpoint(path)["epoch"] for path in tmp_path.iterdir()}
    assert epochs == (set() if step < BATCHES else {0})
    assert max(logged.curve("train/loss"), default=0) <= step


@pytest.mark.parametrize("stop", [3, 7, 8, 10])
def test_a_resumed_run_logs_each_row_once(stop: int, tmp_path: Path) -> None:
    def run(resume: Path | None = None, stop: int = -1) -> list[Any]:
        logged, last = Rows(), best_and_last(tmp_path)[1]
        orderly = OrderlyStop(last)  # type: ignore[arg-type]
        settings: dict[str, Any] = {"limit_val_batches": 0, "log_every_n_steps": 3, "max_epochs": 3}
        with suppress(Interrupted):
            fitted(
                classifier(),
                shapes_data(),
                last,
                stop_at(orderly, stop),
                orderly,
                resume=resume,
                logger=logged,
                **settings,
            )
        return logged.rows

    expected = run()
    first = run(stop=stop)
    middle = (tmp_path / "last.ckpt").rename(tmp_path / "middle.ckpt")
    assert first + run(middle) == expected
