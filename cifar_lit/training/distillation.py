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
from cifar_lit.training.finetune import digest


class Distillation(Callback):
    """Train on the labels and on the predictions of a teacher, which sees the same augmented images.

    The loss of an image is (1 - a) · loss + a · T² · KL(teacher || net), for probabilities at temperature T.
    Checkpoints hold a hash of the teacher, not its weights.

    Args:
        teacher: a classifier, as `cifar_lit.load` returns it.
        data: the datamodule, with `classes`, `input_shape` and `statistics` like ImageData.
        weight: a, 0 … 1.
        temperature: T, above 0.

    Raises:
        UsageError: if the teacher is a path, or was trained on images with other classes or channels.
    """

    def __init__(self, teacher: Any, data: Any, weight: float, temperature: float) -> None:
        if isinstance(teacher, str):
            raise UsageError(f"model.teacher {teacher} is not loaded: in Python, give cifar_lit.load({teacher!r})")
        if not all(hasattr(data, name) for name in ("classes", "input_shape", "statistics")):
            raise UsageError("model.teacher needs classes, input_shape and statistics of the datamodule: define them")
        self._card, self._net = teacher.card, teacher.net.net
        pairs = {"classes": (self._card.classes, data.classes)}
        pairs["channels"] = (self._card.input_shape[:1], data.input_shape[:1])
        for name, (own, given) in pairs.items():
            if [*own] != [*given]:
                own, given = (", ".join(map(str, values))[:100] for values in (own, given))
                raise UsageError(
                    f"the {name} of the teacher ({own}) are not those of the images ({given}): use another"
                )
        self._data, self._weight, self._temperature = data, weight, temperature
        self.hash = digest([self._card, *self._net.state_dict().values()])

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Copy the teacher to the device of the model."""
        values = [*self._data.statistics, self._card.mean, self._card.std]
        mean, std, own_mean, own_std = torch.tensor(values, device=pl_module.device)[..., None, None]
        self._scale, self._shift = std / own_std, (mean - own_mean) / own_std
        self._net = move_data_to_device(deepcopy(self._net).to(pl_module.dtype), pl_module.device)
        pl_module.loss_hooks.append(self)

    @torch.no_grad()
    def answers(self, images: Tensor) -> Tensor:
        """Return the teacher's logits (B, classes) for images (B, C, H, W) that are normalised for the model."""
        images, size = images * self._scale + self._shift, self._card.input_shape[1:]
        if [*images.shape[2:]] != size:
            images = F.interpolate(images, size, mode="bilinear", antialias=True)
        logits: Tensor = self._net(images.type(next(self._net.parameters()).dtype))
        return logits

    def __call__(self, losses: Tensor, logits: Tensor, batch: Any) -> Tensor:
        """Return the losses (B,) of a training batch with the teacher's part: a loss hook of the model."""
        pair = (logits, self.answers(batch[0]))
        log_own, log_taught = (F.log_softmax(values.float() / self._temperature, 1) for values in pair)
        divergence = F.kl_div(log_own, log_taught, reduction="none", log_target=True).sum(1)
        return (1 - self._weight) * losses + self._weight * self._temperature**2 * divergence

    def state_dict(self) -> dict[str, Any]:
        """Return the hash of the teacher."""
        return {"hash": self.hash}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise UsageError if the training was begun with another teacher."""
        if state_dict.get("hash") != self.hash:
            raise UsageError("model.teacher has changed since the training began: restore the file, or start a new run")
