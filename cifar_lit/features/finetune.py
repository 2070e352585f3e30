"""Fine-tuning: load pretrained weights, fit the last layer on features of the frozen net, then train the net.

The last layer (the head) is a multinomial logistic regression (Kornblith et al., Do Better ImageNet Models Transfer
Better?, CVPR 2019). A fitted head avoids the large gradients of a random one (Kumar et al., Fine-Tuning can Distort
Pretrained Features, ICLR 2022).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from cifar_lit.base.errors import UsageError
from cifar_lit.base.files import write_array
from cifar_lit.base.text import progress, say
from cifar_lit.data.sources import find_source
from cifar_lit.inference.logits import FEATURES, OUT_OF_FOLD
from cifar_lit.inference.model_file import read_card
from cifar_lit.models.pretrained import Pretraining, pretraining_of
from cifar_lit.training.checkpoint import RunCheckpoint
from cifar_lit.training.loop import broadcast_from_first
from cifar_lit.training.optimizers import Group
from cifar_lit.training.pretrained_weights import IMAGENET, load_pretrained, net_head
from cifar_lit.training.task import task_of

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData
    from cifar_lit.training.classifier import ImageClassifier


@final
class Finetune(Callback):
    """Start from pretrained weights: fit the last layer on features of the frozen net, then train the net.

    Args:
        weights: imagenet, or a file (.safetensors, .pth), or the folder of a finished run.
        fit_head: first fit the last layer on the plain training images. A run that knows all classes keeps its own.
        unfreeze: train the net after its last layer is fitted. With false, only the last layer is fitted.
        frozen: share of the net's parameter tensors, starting at the input, that stay fixed.
        input_lr: learning rate of the first trained layers. Rates rise geometrically to lr in the last layers (Howard
            and Ruder, ULMFiT, 2018, 3.2). Default: lr.
        fixed_norms: keep the running statistics of batch norms fixed, and normalise with them during training.
    """

    def __init__(
        self,
        weights: str = IMAGENET,
        fit_head: bool = True,
        unfreeze: bool = True,
        frozen: float = 0.0,
        input_lr: float | None = None,
        fixed_norms: bool = False,
    ) -> None:
        self.weights, self.fit_head, self.unfreeze = weights, fit_head, unfreeze
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
        is_grey = 1 in (images.channels, find_source(data.dataset).channels)
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
            card = read_card(self.weights)  # None unless a run wrote them
            old = card.classes if card else []
            classes = getattr(trainer.datamodule, "classes", ())  # type: ignore[attr-defined]
            load_pretrained(pl_module.net, pl_module.hparams["net"], self.weights, old, classes)
            self.knows_all = {*classes} <= {*old}
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
        if self.fit_head and not trainer.ckpt_path:
            self._fit_head(trainer, pl_module)
        if not self.unfreeze:
            trainer.should_stop = True

    def _fit_head(self, trainer: pl.Trainer, model: ImageClassifier) -> None:
        data: ImageData = trainer.datamodule  # type: ignore[attr-defined]
        labels, (train, val), classes = data.train_images.labels, data.split, model.hparams["num_classes"]
        features = first_device_features(trainer, model, train)
        val_features = first_device_features(trainer, model, val)
        head, started = net_head(model.net), time.perf_counter()
        keeps_head = self.knows_all and self.unfreeze
        if trainer.is_global_zero and not keeps_head:
            weight, bias = fit_head(features, labels[train], classes, model.class_balance)
            scale = 1.0
            if self.unfreeze and not any("Norm" in type(module).__name__ for module in model.net.modules()):
                # Large weights would make gradients that SGD cannot follow in a net without norms.
                scale = min(1.0, float(head.weight.norm()) / float(weight.norm()))
            with torch.no_grad():
                head.weight.copy_(scale * weight)
                head.bias.copy_(scale * bias)
        text = f"last layer fitted in {time.perf_counter() - started:.1f} s"
        if keeps_head:
            text = "last layer kept, which knows all classes"
        if trainer.is_global_zero:
            rows, plain = torch.cat((train, val)), torch.cat((features, val_features))
            write_rows(trainer, OUT_OF_FOLD, rows, out_of_fold(plain, labels[rows], classes))
            write_rows(trainer, FEATURES, rows, plain)
        broadcast_from_first(trainer, head.weight, head.bias)
        scores: dict[str, float] = {}
        if len(val):
            logits = F.linear(val_features.float(), head.weight.float().cpu(), head.bias.float().cpu())
            model.evaluation.reset()
            model.evaluation.update(logits.to(model.device), labels[val][: len(logits)].to(model.device))
            model.score = model.evaluation.compute()
            scores = model.score.logged("val")
            text += f" · validation accuracy {model.score.accuracy:.4f}"
        for checkpoint in trainer.checkpoint_callbacks:
            if isinstance(checkpoint, RunCheckpoint):
                checkpoint.save_first(trainer, scores)
        for stop in trainer.early_stopping_callbacks:
            if stop.monitor in scores:
                stop.best_score = torch.tensor(scores[stop.monitor])
        if trainer.is_global_zero:
            say(text)


def write_rows(trainer: pl.Trainer, name: str, rows: Tensor, values: Tensor) -> None:
    """Write a NumPy file with the values of some training images to the run folder, if any; NaN for the others.

    rows: int64 (N,), rows of the images. values: floating-point (N, K).
    """
    folder = getattr(trainer.checkpoint_callback, "dirpath", None)
    if not folder or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    count = len(trainer.datamodule.train_images)  # type: ignore[attr-defined]
    table = torch.full((count, values.shape[1]), torch.nan, dtype=values.dtype)
    table[rows] = values
    write_array(Path(folder).parent / name, table.numpy())


# ---- learning rates

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


# ---- features


def first_device_features(trainer: pl.Trainer, model: ImageClassifier, rows: Tensor) -> Tensor:
    """Return the inputs of the head for training images, computed on the first device.

    rows: int64 (N,), rows of the training images.

    Returns:
        float16 (N, features) on the CPU for the first device; (0, features) for the others.
    """
    head = net_head(model.net)
    if not len(rows) or not trainer.is_global_zero:
        return torch.zeros(0, head.in_features, dtype=torch.float16)
    data: ImageData = trainer.datamodule  # type: ignore[attr-defined]
    inputs: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda module, args: inputs.append(args[0].half().cpu()))
    source = data.train_loader.source
    model.eval()
    with hook, torch.no_grad(), progress("features", len(rows)) as advance:
        for part in rows.to(source.images.device).split(data.loading.eval_batch_size):
            images = data.preprocessing.normalise(source.take(part).to(data.device))
            with trainer.precision_plugin.forward_context():
                model.net(images.type(head.weight.dtype))
            advance(len(part))
    model.train()
    return torch.cat(inputs)


# ---- the head

STRENGTHS = [0.3, 0.1, 0.03, 0.01, 0.003, 0.001]  # L2 penalties, for standardised features
ITERATIONS = 60  # L-BFGS iterations for each strength, starting from the previous solution
FOLDS = 5
FOLDED_ROWS = 2000  # features; with more, only one fold is held out
FITTED_ROWS = 100_000  # features; more cost memory and hardly improve the accuracy


def solve(
    rows: Tensor, labels: Tensor, num_classes: int, strengths: Sequence[float], class_weights: Tensor | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Return a multinomial logistic regression for each strength of the L2 penalty, found from the previous ones.

    Args:
        rows: standardised features, float32 (N, features).
        labels: int64 (N,).
        class_weights: weights of the loss, float32 (classes,).

    Returns:
        Weight (classes, features) and bias (classes,) of each.
    """
    weight = torch.zeros(num_classes, rows.shape[1], requires_grad=True)
    bias = torch.zeros(num_classes, requires_grad=True)
    solutions = []
    for strength in strengths:
        solver = torch.optim.LBFGS([weight, bias], max_iter=ITERATIONS, line_search_fn="strong_wolfe")

        def loss(strength: float = strength) -> Tensor:
            weight.grad = bias.grad = None
            fit = head_loss(rows @ weight.T + bias, labels, class_weights)
            value = fit + strength / 2 * weight.square().sum()
            value.backward()
            return value

        with torch.enable_grad():
            solver.step(loss)
        solutions.append((weight.detach().clone(), bias.detach().clone()))
    return solutions


def head_loss(logits: Tensor, labels: Tensor, class_weights: Tensor | None) -> Tensor:
    """Return the mean loss of logits (N, classes), with several labels an image the sum over its labels."""
    if labels.ndim == 2:
        return logits.shape[1] * task_of(labels).loss(logits, labels, 0.0, "mean")
    return F.cross_entropy(logits, labels, class_weights)


def fit_head(
    features: Tensor, labels: Tensor, num_classes: int, class_weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return a logistic regression with an L2 penalty of the strength that cross-validation selects.

    Args:
        features: (N, features).
        labels: int64 (N,).
        class_weights: float32 (classes,), weights of the loss.

    Returns:
        Weight (classes, features) and bias (classes,), float32.
    """
    generator = torch.Generator().manual_seed(0)
    folds = draw_folds(labels, num_classes, generator)
    if len(labels) > FITTED_ROWS:
        subset = torch.randperm(len(labels), generator=generator)[:FITTED_ROWS].sort().values
        features, labels, folds = features[subset], labels[subset], folds[subset]
    rows, mean, std = standardise(features)
    fold_count = 1
    if len(rows) <= FOLDED_ROWS:
        fold_count = min(FOLDS, int(folds.max()) + 1)
    losses = torch.zeros(len(STRENGTHS))
    for fold in range(fold_count):
        held_out = folds == fold
        solutions = solve(rows[~held_out], labels[~held_out], num_classes, STRENGTHS, class_weights)
        for index, (weight, bias) in enumerate(solutions):
            logits = rows[held_out] @ weight.T + bias
            losses[index] += head_loss(logits, labels[held_out], class_weights)
    best = int(losses.argmin())
    weight, bias = solve(rows, labels, num_classes, STRENGTHS[: best + 1], class_weights)[-1]
    weight = weight / std
    return weight, bias - weight @ mean


def out_of_fold(features: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Return the probabilities of heads that were not fitted on the image, float32 (N, classes).

    The penalty is the strongest one, so that a few wrong labels change little. A class with all of its images in one
    fold is unknown to the head that predicts them.

    features: (N, features). labels: int64 (N,).
    """
    generator = torch.Generator().manual_seed(0)
    folds = draw_folds(labels, num_classes, generator)
    logits = torch.zeros(len(labels), num_classes)
    for fold in folds.unique().tolist():
        held_out = folds == fold
        others = (~held_out).nonzero().flatten()
        others = others[torch.randperm(len(others), generator=generator)[:FITTED_ROWS]]
        rows, mean, std = standardise(features[others])
        ((weight, bias),) = solve(rows, labels[others], num_classes, STRENGTHS[:1])
        logits[held_out] = (features[held_out].float() - mean) / std @ weight.T + bias
    return task_of(labels).probabilities(logits)


def standardise(features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return features (N, features) with mean 0 and deviation 1, and the means and deviations (features,)."""
    features = features.float()
    mean, std = features.mean(0), features.std(0).clamp_min(1e-6)
    return (features - mean) / std, mean, std


def draw_folds(labels: Tensor, num_classes: int, generator: torch.Generator) -> Tensor:
    """Return a fold of `FOLDS` for each image, int64 (N,), with equal shares of each class, unless it has several."""
    folds = torch.empty(len(labels), dtype=torch.int64)
    if labels.ndim == 2:
        return torch.randperm(len(labels), generator=generator) % FOLDS
    for label in range(num_classes):
        rows = (labels == label).nonzero().flatten()
        folds[rows[torch.randperm(len(rows), generator=generator)]] = torch.arange(len(rows)) % FOLDS
    return folds
