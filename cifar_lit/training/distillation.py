"""Knowledge distillation from a trained net (`model.teacher`; G. Hinton et al., 2015)."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.errors import UsageError
from cifar_lit.text import nfc
from cifar_lit.training.finetune import digest


class Distillation(Callback):
    """Train on labels and on the predictions of a teacher for the same images. Checkpoints hold only its hash.

    Args:
        teacher: a classifier, as `cifar_lit.load` returns it. Raises UsageError for other classes or channels.
        data: the datamodule, with `classes`, `input_shape` and `statistics` like ImageData.
        weight: a, 0 … 1. The loss of an image is (1 - a) · loss + a · T² · KL(teacher || net).
        temperature: T, divisor of the logits of both nets.
    """

    def __init__(self, teacher: Any, data: Any, weight: float, temperature: float) -> None:
        if isinstance(teacher, str):
            raise UsageError(f"model.teacher {teacher} is not loaded: in Python, give cifar_lit.load({teacher!r})")
        if not all(hasattr(data, name) for name in ("classes", "input_shape", "statistics")):
            raise UsageError("model.teacher needs classes, input_shape and statistics of the datamodule: define them")
        self._card, self._net = teacher.card, teacher.net.net
        own, given = ([f"{images.input_shape[0]} channels", *map(nfc, images.classes)] for images in (self._card, data))
        if own != given:
            texts = [f"{names[0]}, {len(names) - 1} classes: {', '.join(names[1:])}"[:100] for names in (own, given)]
            fault = f"other classes ({texts[0]}) than these ({texts[1]})"
            raise UsageError(f"model.teacher was trained on {fault}: use another")
        self._data, self._weight, self._temperature = data, weight, temperature
        self._hash = digest([self._card, *self._net.state_dict().values()])

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Copy the teacher to the device of the model."""
        values = [*self._data.statistics, self._card.mean, self._card.std]
        mean, std, own_mean, own_std = torch.tensor(values, device=pl_module.device)[..., None, None]
        self._scale, self._shift = std / own_std, (mean - own_mean) / own_std
        self._net = move_data_to_device(deepcopy(self._net).to(pl_module.dtype), pl_module.device)
        pl_module.loss_hooks.append(self)

    def __call__(self, losses: Tensor, logits: Tensor, batch: Any) -> Tensor:
        """Return the losses (B,) of a training batch with the teacher's part: a loss hook of the model."""
        images, size = batch[0] * self._scale + self._shift, self._card.input_shape[1:]
        if [*images.shape[2:]] != size:
            images = F.interpolate(images, size, mode="bilinear", antialias=True)
        with torch.no_grad():
            answers = self._net(images.type(next(self._net.parameters()).dtype))
        own, taught = (F.log_softmax(values.float() / self._temperature, 1) for values in (logits, answers))
        divergence = F.kl_div(own, taught, reduction="none", log_target=True).sum(1)
        return (1 - self._weight) * losses + self._weight * self._temperature**2 * divergence

    def state_dict(self) -> dict[str, Any]:
        """Return the hash of the teacher."""
        return {"hash": self._hash}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise UsageError if the training was begun with another teacher."""
        if state_dict.get("hash") != self._hash:
            raise UsageError("model.teacher has changed since the training began: restore the file, or start a new run")
