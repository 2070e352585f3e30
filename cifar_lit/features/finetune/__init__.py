"""Fine-tuning: load pretrained weights, fit the last layer on features of the frozen net, then train the net."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from cifar_lit.base.errors import UsageError
from cifar_lit.base.files import write_array
from cifar_lit.base.text import progress, say
from cifar_lit.data.sources import find_source
from cifar_lit.features.finetune.head import batches_of_view, compute_features, fit_head, out_of_fold
from cifar_lit.features.finetune.pretrained import IMAGENET, load_pretrained, net_head
from cifar_lit.inference.model_file import read_card
from cifar_lit.models.pretrained import Pretraining, pretraining_of
from cifar_lit.training.checkpoint import RunCheckpoint
from cifar_lit.training.loop import broadcast_from_first
from cifar_lit.training.optimizers import Group

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData
    from cifar_lit.training.classifier import ImageClassifier


@final
class Finetune(Callback):
    """Start from pretrained weights: fit the last layer on features of the frozen net, then train the net.

    Args:
        weights: imagenet, or a file (.safetensors, .pth), or the folder of a finished run.
        head_views: number of views of each training image on which the last layer is first fitted. The first view is
            plain, the others are augmented. 0 skips this fit.
        unfreeze: train the net after its last layer is fitted. With false, only the last layer is fitted.
        frozen: share of the net's parameter tensors, starting at the input, that stay fixed.
        input_lr: learning rate of the first trained layers. Rates rise geometrically to lr in the last layers (Howard
            and Ruder, ULMFiT, 2018, 3.2). Default: lr.
        fixed_norms: keep the running statistics of batch norms fixed, and normalise with them during training.
    """

    def __init__(
        self,
        weights: str = IMAGENET,
        head_views: int = 2,
        unfreeze: bool = True,
        frozen: float = 0.0,
        input_lr: float | None = None,
        fixed_norms: bool = False,
    ) -> None:
        self.weights, self.head_views, self.unfreeze = weights, head_views, unfreeze
        self.frozen, self.input_lr, self.fixed_norms = frozen, input_lr, fixed_norms

    @staticmethod
    def adjust_settings(own: Any, settings: Any) -> None:
        """Set mean, std and image size of the data to those of the pretraining, where the settings leave them open."""
        data, images, net = settings.data, settings.data.images, settings.model.net
        card = read_card(own.get("weights", IMAGENET))  # None unless a run wrote them
        pretraining = pretraining_of(net)
        if card:
            pretraining = Pretraining(card.mean, card.std, (card.input_shape[1], card.input_shape[2]))
        if not pretraining:
            return
        is_grey = 1 in (images.channels, find_source(data.dataset).fixed.get("channels"))
        for name in ("mean", "std"):
            if getattr(images, name) is None:
                channels = getattr(pretraining, name)
                setattr(images, name, [sum(channels) / len(channels)] if is_grey else channels)
        if data.dataset == "folder" and images.image_size is None:
            images.image_size = list(pretraining.image_size)

    def setup(self, trainer: pl.Trainer, pl_module: ImageClassifier, stage: str) -> None:
        """Load the weights unless the fit is resumed, and freeze the first layers."""
        if stage != "fit":
            return
        if not trainer.ckpt_path:
            load_pretrained(pl_module.net, pl_module.hparams["net"], self.weights)
        if self.input_lr is not None:
            pl_module.regroup = partial(split_by_depth, pl_module.net, self.input_lr)
        parameters = list(pl_module.net.parameters())
        for parameter in parameters[: int(self.frozen * len(parameters))]:
            parameter.requires_grad_(False)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make batch norms use their running statistics without updating them. A validation resets this."""
        if self.fixed_norms:
            for module in pl_module.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()

    on_fit_start = on_train_epoch_start  # a fit that is resumed within an epoch does not start this epoch

    def on_train_start(self, trainer: pl.Trainer, pl_module: ImageClassifier) -> None:
        """Fit the last layer, and save it as the first checkpoint, unless the training is resumed."""
        if self.head_views and not trainer.ckpt_path:
            self._fit(trainer, pl_module)
        if not self.unfreeze:
            trainer.should_stop = True

    def _fit(self, trainer: pl.Trainer, model: ImageClassifier) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        h, labels, (train, val) = model.hparams, data.train_images.labels, data.split
        classes = h["num_classes"]
        features = _features(trainer, model, train, self.head_views)
        val_features = _features(trainer, model, val, 1) if len(val) else None
        head, started = net_head(model.net), time.perf_counter()
        if features is not None:
            weight, bias = fit_head(features, labels[train], classes, self.head_views, model.class_balance)
            with torch.no_grad():
                head.weight.copy_(weight)
                head.bias.copy_(bias)
        text, scalars = f"last layer fitted in {time.perf_counter() - started:.1f} s", {}
        if features is not None:
            _write_out_of_fold(trainer, model, features, val_features)
        broadcast_from_first(trainer, head.weight, head.bias)
        if len(val):
            model.evaluation.reset()
            logits = torch.zeros(0, classes)  # only the first device has features
            if val_features is not None:
                logits = F.linear(val_features.float(), weight, bias)
            model.evaluation.update(*move_data_to_device((logits, labels[val][: len(logits)]), model.device))
            model.score = model.evaluation.compute()
            scalars = model.score.logged("val")
            text += f" · validation accuracy {model.score.accuracy:.4f}"
        for checkpoint in trainer.checkpoint_callbacks:
            if isinstance(checkpoint, RunCheckpoint):
                checkpoint.save_first(trainer, scalars)
        for stop in trainer.early_stopping_callbacks:
            if stop.monitor in scalars:
                stop.best_score = torch.tensor(scalars[stop.monitor])
        if trainer.is_global_zero:
            say(text)


def _features(trainer: pl.Trainer, model: ImageClassifier, rows: Tensor, views: int) -> Tensor | None:
    """Return features of training images, computed on all devices. Collective: every rank must call this.

    rows: int64 (N,), rows of the training images.

    Returns:
        float16 (views · N, features) on the CPU for the first device; None for the others.
    """
    data: ImageData = trainer.datamodule  # type: ignore[attr-defined]
    rank, world = trainer.global_rank, trainer.world_size
    rank_rows = rows[rank::world]
    rows_or_one = rank_rows if len(rank_rows) else rows[:1]  # there may be fewer images than devices
    parts: list[Tensor] = []
    model.eval()
    for view in range(views):
        title = f"features of view {view + 1}" if view else "features"
        with progress(title, len(rows_or_one)) as advance:
            batches = batches_of_view(data, rows_or_one, view)
            features = compute_features(model.net, batches, trainer.precision_plugin.forward_context, advance)
        if world > 1:
            gathered = torch.zeros(len(rows), features.shape[1], device=model.device)
            gathered[rank::world] = features[: len(rank_rows)].to(gathered)
            features = trainer.strategy.reduce(gathered, reduce_op="sum").half().cpu()
        parts.append(features)
    model.train()
    return torch.cat(parts) if trainer.is_global_zero else None


OUT_OF_FOLD = "out_of_fold.npy"  # `runs.label_errors` reads it


def _write_out_of_fold(
    trainer: pl.Trainer, model: ImageClassifier, features: Tensor, val_features: Tensor | None
) -> None:
    """Write `OUT_OF_FOLD` to the run folder: predictions for training and validation images, to find wrong labels.

    features: (views · N, features) of the training images, the plain view first. val_features: (M, features).
    """
    folder = getattr(trainer.checkpoint_callback, "dirpath", None)
    if not folder or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    data: ImageData = trainer.datamodule  # type: ignore[attr-defined]
    train, val = data.split
    rows, plain = train, features[: len(train)]
    if val_features is not None:
        rows, plain = torch.cat((train, val)), torch.cat((plain, val_features))
    classes = model.hparams["num_classes"]
    probabilities = torch.full((len(data.train_images), classes), torch.nan)
    probabilities[rows] = out_of_fold(plain, data.train_images.labels[rows], classes)
    write_array(Path(folder).parent / OUT_OF_FOLD, probabilities.numpy())


DEPTHS = 8  # groups of adjacent layers


def split_by_depth(net: nn.Module, input_lr: float, groups: list[Group]) -> list[Group]:
    """Split parameter groups by depth, with rates that rise from `input_lr` to the rate of the group."""
    if any(group["role"] not in ("weights", "biases") for group in groups):
        raise UsageError("model.optimizer muon does not support finetune.input_lr: use adamw or sgd")
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    count = min(DEPTHS, len(trained))
    depths = {parameter: index * count // len(trained) for index, parameter in enumerate(trained)}
    split: list[Group] = []
    for group in groups:
        parts: dict[int, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            parts.setdefault(depths[parameter], []).append(parameter)
        ratio = group["lr"] / input_lr
        for depth, params in parts.items():
            height = depth / (count - 1) if count > 1 else 1
            split.append({**group, "params": params, "lr": input_lr * ratio**height})
    return split
