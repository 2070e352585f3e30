"""What a checkpoint of a training holds beyond Lightning's states, and how a model goes on from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from cifar_lit.errors import UsageError
from cifar_lit.training.callbacks import refuse_weights_that_are_not_finite
from cifar_lit.training.metrics import Score
from cifar_lit.training.optimizers import override_optimizer_settings
from cifar_lit.training.step import Sums

if TYPE_CHECKING:
    from cifar_lit.training.classifier import ImageClassifier


def saved_state(model: ImageClassifier) -> dict[str, Any]:
    """Sums since the last log line and in the epoch so far, and the last score, as plain values; asks all devices.

    Raises NotFiniteLoss when a weight is not finite.
    """
    refuse_weights_that_are_not_finite(model.net, model.global_step, model.current_epoch)
    return {
        "window_sums": model.window_sums(),
        "device_sums": _device_sums(model),
        "epoch_sums": list(model.epoch_sums),
        "logged_step": model.logged_step,
        "score": model.score._asdict() if model.score else None,
    }


def _device_sums(model: ImageClassifier) -> list[list[float]]:
    """Loss, hits and images since the last log line, of each device."""
    strategy, sums = model.trainer.strategy, model.sums
    rows = sums.loss.new_zeros((model.trainer.world_size, 3))
    rows[model.trainer.global_rank] = torch.stack((sums.loss, sums.hits, sums.hits.new_tensor(sums.images)))
    found: list[list[float]] = strategy.reduce(rows, reduce_op="sum").tolist()
    return found


def take_up(model: ImageClassifier, checkpoint: dict[str, Any]) -> None:
    """Brings a model that is about to be fitted to where `checkpoint` was; its own rates and decays win.

    Raises UsageError when the checkpoint is of another net.
    """
    before = checkpoint.get("hyper_parameters", {})
    for name in ("net", "width", "net_options", "input_shape", "num_classes"):
        if (before.get(name, model.hparams[name]) or None) != (model.hparams[name] or None):
            raise UsageError(
                f"this run's {name} is {before[name]}, not {model.hparams[name]}: leave the settings of net and images "
                "as they were, or start a new run"
            )
    override_optimizer_settings(checkpoint, model.hparams, model.net)
    state = checkpoint.get("cifar_lit")
    if not state:
        return
    rank, each = model.trainer.global_rank, state.get("device_sums", [])
    if len(each) == model.trainer.world_size:  # so that they are added up as if nothing had been
        loss, hits, images = each[rank]
        model.sums = Sums(model.device, loss, hits, int(images))
    elif rank == 0:  # the sums of all devices go on in the first one
        loss, hits, images = state["window_sums"]
        model.sums = Sums(model.device, loss, hits, int(images))
    model.epoch_sums = list(state["epoch_sums"])
    model.logged_step = state["logged_step"]
    model.score = Score(**state["score"]) if state["score"] else None
