"""`ImageClassifier`, the LightningModule: a net with its loss, metrics, optimizer and schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import get_total_norm
from torchmetrics import Metric

from cifar_lit.errors import UsageError, check_choice
from cifar_lit.hardware import keep_freed_memory, return_freed_memory
from cifar_lit.models.checks import check_shapes
from cifar_lit.models.registry import build_net, check_net
from cifar_lit.models.tta import VIEWS, view_logits
from cifar_lit.plugins import import_callable, is_import_path
from cifar_lit.training.callbacks import NotFiniteLoss, check_finite, gather_rows
from cifar_lit.training.features import check_features, feature_callbacks
from cifar_lit.training.metrics import TOP, Evaluation, RunningMetrics, Score, value_names
from cifar_lit.training.optimizers import REST_MOMENTUM, check_settings, configure_optimizers
from cifar_lit.training.predictions import PredictionCollector
from cifar_lit.training.resume import check_restored_state, check_resumable, override_optimizer_settings

DEFAULT_SHAPE = (3, 32, 32)

# Called with the losses (B,) of a training batch and the batch; returns the losses to train on. Features add theirs in a fit.
LossHook = Callable[[Tensor, Any], Tensor]


def check_model(settings: Mapping[str, Any]) -> None:
    """Raise UsageError for settings of ImageClassifier that are invalid for any images; builds no net.

    Imports a net and an optimizer that are named by their import paths.
    """
    check_net(settings["net"], settings["net_options"] or {})
    if is_import_path(settings["optimizer"]):
        import_callable(settings["optimizer"])
    _check_choices(settings)
    check_choice("model.monitor", settings["monitor"], value_names(TOP + 1, settings["metrics"] or {}))


def _check_choices(h: Mapping[str, Any]) -> None:
    check_settings(h)
    check_features(h)
    check_choice("model.tta", h["tta"], VIEWS)


class ImageClassifier(pl.LightningModule):
    """An image classification net with cross-entropy loss, metrics, optimizer and schedule.

    It trains and tests on any datamodule or DataLoader of batches `(images, labels)`: normalised float images (B, C, H, W), int64
    labels (B,). A batch may also have the further attributes of `data.batch.Batch`.

    Args:
        net: name of a net, or the import path of a class or function (see `models.registry`), or a torch module. A module is not
            saved in `hparams`: pass it to `load_from_checkpoint` again.
        input_shape: channels, height and width of the images; by default those of the datamodule, or [3, 32, 32].
        num_classes: by default `class_count` of the datamodule.
        width: factor of the hidden widths of our nets.
        net_options: further options of the net, such as {widths: [32, 96, 96]} for `whitened`.
        label_smoothing: share of the target spread over all classes, 0 … 1.
        class_weights: weights of the training loss for unequal classes: none, balanced (one over the number of training images
            of the class) or effective (one over their effective number, which evens out less).
        optimizer: sgd, adamw, muon (orthogonalised filters, SGD for the rest), or the import path of a torch optimizer.
        lr: highest learning rate; under muon, that of the filters.
        momentum: momentum of SGD; under muon, that of the filters.
        nesterov: use Nesterov's momentum.
        weight_decay: of weights, not of biases and norms; coupled in SGD, decoupled in AdamW. Under muon, the share that
            parameters other than filters lose in a step at the highest rate.
        bias_lr: under muon, rate of biases and norms; default lr.
        head_lr: under muon, rate of the last layer; default lr.
        rest_momentum: under muon, momentum of the SGD part.
        rescale_filters: under muon, bring each filter tensor to the norm √outputs at every step.
        whiten_epochs: epochs after which the rate of a whitening layer's bias is 0, and the bias costs no more time; default
            the schedule of the other parameters.
        schedule: constant, cosine, one_cycle or triangular.
        schedule_every: change the rate every step or every epoch.
        warmup_epochs: epochs of linear warm-up before the schedule (may be a fraction).
        final_lr: rate at the end, as a fraction of lr.
        ema_decay: decay per step of an average of the weights, which is validated and kept; 0 for none.
        channels_last: keep convolution weights in channels_last memory, which CPUs and tensor cores prefer.
        compile: compile the net with torch.compile.
        capture: replay training steps as CUDA graphs where nothing has to run between them.
        tta: test-time augmentation, scored beside the plain accuracy: none, mirror, or full (mirror and shifts by a pixel).
        weights: pretrained weights: imagenet, or a file (.safetensors, .pth); default random weights.
        head_views: views of each training image (one plain, the others augmented) on whose features the last layer of a
            pretrained net is fitted before training; 0 to skip that fit.
        unfreeze: train the pretrained net after that fit; false to keep all but the last layer.
        frozen: share of the pretrained net's parameters, from the input on, that keep their values.
        input_lr: rate of the first trained layers, rising in equal ratios to lr in the last ones; default lr.
        fixed_norms: keep the running statistics of batch norms, and normalise by them in training too.
        metrics: further torchmetrics for validation and test by name, given logits (B, classes) and labels (B,).
        monitor: validation score that the best checkpoint is chosen by: accuracy, balanced_accuracy, macro_f1, top5 (of more
            than five classes), loss (the lowest), or one of `metrics`.
        patience: stop after this many validations without a better score, or, below 1, after that share of the epochs; 0 to
            train to the end. An EarlyStopping among the Trainer's callbacks takes precedence.
    """

    net: nn.Module
    is_pretrained = False  # whether the pretrained weights of `weights` are loaded
    weighs_batches = True  # for ImageData: this module knows `Batch.loss_weight` and padded labels

    def __init__(
        self,
        net: str | nn.Module = "resnet18",
        input_shape: list[int] | None = None,
        num_classes: int | None = None,
        width: float = 1.0,
        net_options: dict[str, Any] | None = None,
        label_smoothing: float = 0.0,
        class_weights: str = "none",
        optimizer: str = "sgd",
        lr: float = 0.1,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        bias_lr: float | None = None,
        head_lr: float | None = None,
        rest_momentum: float = REST_MOMENTUM,
        rescale_filters: bool = True,
        whiten_epochs: float | None = None,
        schedule: str = "constant",
        schedule_every: str = "step",
        warmup_epochs: float = 0.0,
        final_lr: float = 0.0,
        ema_decay: float = 0.0,
        channels_last: bool = True,
        compile: bool = False,
        capture: bool = False,
        tta: str = "none",
        weights: str | None = None,
        head_views: int = 2,
        unfreeze: bool = True,
        frozen: float = 0.0,
        input_lr: float | None = None,
        fixed_norms: bool = False,
        metrics: dict[str, Metric] | None = None,
        monitor: str = "accuracy",
        patience: float = 0.0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["metrics", "net"])
        self.hparams["net"] = net if isinstance(net, str) else type(net).__name__
        _check_choices(self.hparams)
        self._metrics = metrics
        if isinstance(net, nn.Module):
            self.net = net
        self.loss_hooks: list[LossHook] = []
        self.running = RunningMetrics(self.device)  # of this device's training steps
        self.logged_step = 0
        self.logged_loss = math.nan  # the training loss of the last row
        self._collector = PredictionCollector()
        self.score: Score | None = None  # of the last validation or test
        self.views_score: Score | None = None  # of the last test, with test-time views
        self.predictions: dict[str, Tensor] | None = None  # of the last test or validation outside of a fit
        self._reads_losses = True  # at every step; on other devices than CPUs that would wait for them
        if num_classes is not None:
            self._build(list(input_shape or DEFAULT_SHAPE), num_classes)

    def _build(self, input_shape: list[int], num_classes: int) -> None:
        """Build net and metrics, once the shape of the images and the number of classes are known."""
        h = self.hparams
        h["input_shape"], h["num_classes"] = input_shape, num_classes
        if not hasattr(self, "net"):
            shape: dict[str, Any] = {
                "channels": input_shape[0],
                "image_size": tuple(input_shape[1:]),
                "num_classes": num_classes,
            }
            self.net = build_net(h["net"], **shape, width=h["width"], options=h["net_options"])
        if h["channels_last"]:
            for parameter in self.net.parameters():
                if parameter.ndim == 4:
                    parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        check_shapes(self.net, h["net"], input_shape, num_classes)
        parameters = list(self.net.parameters())
        for parameter in parameters[: int(h["frozen"] * len(parameters))]:
            parameter.requires_grad_(False)
        if h["compile"]:
            self.net.compile(dynamic=False)  # a graph for each size, rather than a slower one for all
        self.evaluation, self.views = Evaluation(num_classes, self._metrics), Evaluation(num_classes)
        check_choice("model.monitor", h["monitor"], self.evaluation.names)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, classes) of normalised float images (B, C, H, W), in the precision of the weights."""
        return self.net(images.type(self.dtype))

    # ---- training

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean loss of a batch, times its `loss_weight` if it has one; see `data.batch.Batch`."""
        images, labels = batch
        weight, targets = getattr(batch, "loss_weight", 1.0), getattr(batch, "targets", None)
        logits = self(images)
        targets = labels if targets is None else targets
        smoothing = self.hparams["label_smoothing"]
        if self.loss_hooks:
            losses = F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="none")
            for hook in self.loss_hooks:
                losses = hook(losses, batch)
            loss = losses.mean()
        else:
            loss = F.cross_entropy(logits, targets, label_smoothing=smoothing)
        if weight:
            self.running.update(loss.detach(), logits, labels)
        if not self._reads_losses:
            self.running.watch(loss.detach())
        elif not math.isfinite(value := loss.item()):
            raise self._not_finite(f"{value}", self.global_step)
        return loss if weight == 1.0 else loss * weight

    # Less of Lightning's bookkeeping per step, with `callbacks.NoProfiler`: `lenet` trains in 0.81 times the time (n = 7).
    training_step.__signature__ = signature(training_step)  # type: ignore[attr-defined]

    def __setattr__(self, name: str, value: Any) -> None:
        """Skip nn.Module's checks for the hook names that Lightning sets about forty times a step."""
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def configure_optimizers(self) -> Any:
        """Return optimizer and schedule; the schedule spans the training that the Trainer is to make."""
        return configure_optimizers(self.net, self.hparams, self.trainer)

    def configure_callbacks(self) -> list[Callback]:
        """Build the net from the datamodule if it is not built yet. Return the callbacks that the settings ask for."""
        if self.hparams["num_classes"] is None:
            data = self.trainer.datamodule  # type: ignore[attr-defined]
            if not hasattr(data, "class_count"):
                raise UsageError("the number of classes is not known: use ImageClassifier(num_classes=…)")
            shape = self.hparams["input_shape"] or getattr(data, "input_shape", None) or DEFAULT_SHAPE
            self._build(list(shape), data.class_count)
        self.loss_hooks = []
        return feature_callbacks(self, self.trainer)

    def setup(self, stage: str) -> None:
        """Reset the state of an earlier fit."""
        if stage == "fit":
            self.running = RunningMetrics(self.trainer.strategy.root_device)
            self.logged_step, self.logged_loss = 0, math.nan
            self._reads_losses = True

    def on_fit_start(self) -> None:
        """Choose how losses are checked, and what happens with freed memory."""
        if getattr(self.trainer.datamodule, "reads_ahead", False):  # type: ignore[attr-defined]
            return_freed_memory()  # the images do not fit into memory
        elif self.device.type == "cpu":
            keep_freed_memory()
        if self.device.type != "cpu":
            self.watch_losses()

    def watch_losses(self) -> None:
        """Check losses on the device, without reading each. After one that is not finite, steps change nothing."""
        self._reads_losses = False
        if getattr(self.trainer.precision_plugin, "scaler", None) is None:  # a GradScaler does the same
            for optimizer in self.trainer.optimizers:
                optimizer.found_inf = self.running.non_finite  # type: ignore[attr-defined]

    def on_train_start(self) -> None:
        """Check the state of restored optimizers."""
        for optimizer in self.trainer.optimizers:
            check_restored_state(optimizer)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Count the images on the host: a replayed step cannot."""
        self.running.images += len(batch[1]) if getattr(batch, "loss_weight", 1.0) else 0
        self.running.batches += 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log a row when it is due, at the end of an epoch, and at the end of the training."""
        loop = self.trainer.fit_loop.epoch_loop
        if self.running.batches and (self._row_is_due or loop.batch_progress.is_last_batch or loop.done):
            shown = {name: value for name, value in self._log_row().items() if name.startswith("train/")}
            self.log_dict(shown, prog_bar=True, logger=False, on_step=True, on_epoch=False)

    @property
    def _row_is_due(self) -> bool:
        every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        return every > 0 and self.global_step - self.logged_step >= every

    def _log_row(self) -> dict[str, float]:
        loss, hits, images = sums = self._device_sums().sum(0).tolist()
        self.running.epoch = [before + now for before, now in zip(self.running.epoch, sums, strict=True)]
        self.running.start_row()
        self.logged_step, self.logged_loss = self.global_step, loss / images
        group = self.trainer.optimizers[0].param_groups[0]
        rate = float(group["lr"])
        if self.hparams["input_lr"] is not None:  # the group of the first layers; log the rate of the last ones
            rate *= self.hparams["lr"] / float(group.get("initial_lr", rate))
        values = {"train/loss": loss / images, "train/accuracy": hits / images, "lr": rate}
        if self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            values["weight_norm"] = float(get_total_norm([parameter.detach() for parameter in self.net.parameters()]))
        self._write_row(values)
        return values

    def _write_row(self, values: Mapping[str, float]) -> None:
        """Write values to the loggers at the current step; `self.log` at every step costs more than a step of a small net."""
        for logger in self.trainer.loggers:
            logger.log_metrics({**values, "epoch": self.current_epoch}, self.global_step)

    def _device_sums(self) -> Tensor:
        """Return loss, hits and images of each device since the last row, (devices, 3). Raise NotFiniteLoss if need be."""
        rows = gather_rows(self.trainer, self, self.running.sums()).cpu()
        if rows[:, 3].any():
            steps = int(self.running.finite_steps) // self.trainer.accumulate_grad_batches  # batches were counted
            raise self._not_finite("not finite", self.logged_step + steps)
        return rows[:, :3]

    def _not_finite(self, what: str, step: int) -> NotFiniteLoss:
        return NotFiniteLoss(f"the loss is {what} at step {step} of epoch {self.current_epoch}")

    def on_train_epoch_end(self) -> None:
        """Log the means of the epoch for callbacks that monitor them."""
        loss, accuracy = self.running.epoch_means()
        self._log_scalars({"train/loss": loss, "train/accuracy": accuracy}, logger=False)
        self.running.epoch = [0.0, 0.0, 0.0]

    def _log_scalars(self, values: Mapping[str, float], **settings: Any) -> None:
        """Log values that are equal on all devices. The maximum over devices keeps every bit, which their mean would not."""
        device = self.device if self.trainer.world_size > 1 else "cpu"  # Apple's GPUs have no float64
        for name, value in values.items():
            tensor = torch.tensor(value, dtype=torch.float64, device=device)
            self.log(
                name, tensor, on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True, batch_size=1, **settings
            )

    # ---- evaluation

    @property
    def monitored(self) -> tuple[str, str]:
        """The score that the best checkpoint is chosen by, such as `val/accuracy`, and whether its `max` or `min` is best."""
        name = self.hparams["monitor"]
        lowest = name == "loss" or (
            name in self.evaluation.further and self.evaluation.further[name].higher_is_better is False
        )
        return f"val/{name}", "min" if lowest else "max"

    def on_validation_epoch_start(self) -> None:
        """Reset the metrics, and give all devices the norm statistics of the first one."""
        for metric in (self.evaluation, self.views, self._collector):
            metric.reset()
        if self.trainer.world_size > 1:
            for buffer in self.net.buffers():
                if buffer.is_floating_point():
                    torch.distributed.broadcast(buffer, 0)

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Count one batch. Outside of a fit, keep the prediction of each image if the batch has `indices`."""
        images, labels = batch
        logits = self(images)
        self.evaluation.update(logits, labels)
        if self.trainer.state.fn != "fit" and hasattr(batch, "indices"):
            self._collector.update(logits, labels, batch.indices)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Count one batch, also by its test-time views if `tta` is set."""
        self.validation_step(batch, batch_idx)
        if self.hparams["tta"] != "none":
            images, labels = batch
            self.views.update(view_logits(self.net, images.type(self.dtype), self.hparams["tta"]), labels)

    def on_validation_epoch_end(self) -> None:
        """Log the scores as `val/accuracy`, `val/loss` and so on, in a test as `test/…`."""
        self.score = self.evaluation.compute()
        self.predictions = self._collector.predictions() if self._collector.update_called else None
        stage = "test" if self.trainer.testing else "val"
        if self.views.loss.update_called:
            self.views_score = self.views.compute()
        scores = self.score.logged(stage)
        fits = self.trainer.state.fn == "fit"
        if fits and not self.trainer.sanity_checking:
            self._write_row(scores)  # Lightning would write it one step too early
        if fits and not math.isfinite(self.score.loss):
            scores |= {"val/accuracy": math.nan, self.monitored[0]: math.nan}  # never the best, however accurate
        accuracy = f"{stage}/accuracy"
        self._log_scalars({accuracy: scores.pop(accuracy)}, prog_bar=True, logger=not fits)
        self._log_scalars(scores, logger=not fits)

    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Return the `probabilities` (B, classes) of a batch, with its `labels` and `indices` if it has them; no padding."""
        if isinstance(batch, Tensor):
            return {"probabilities": self(batch).float().softmax(1)}
        images, labels = batch
        counted = labels >= 0
        values = {"labels": labels, "probabilities": self(images).float().softmax(1)}
        if hasattr(batch, "indices"):
            values["indices"] = batch.indices
        return {name: value[counted] for name, value in values.items()}

    # ---- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what an exact resume needs beyond Lightning's states. Raise NotFiniteLoss if it is not finite."""
        if self.running.batches and self._row_is_due:  # callbacks save before the row of this step is logged
            self._log_row()
        check_finite(self, checkpoint)
        checkpoint["cifar_lit"] = {
            "device_sums": self._device_sums().tolist(),
            "epoch_sums": list(self.running.epoch),
            "logged_step": self.logged_step,
            "score": {**self.score._asdict(), "confusion": torch.tensor(self.score.confusion)} if self.score else None,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore that state for a fit. Raise UsageError if the checkpoint is of another net or kind of schedule."""
        if self._trainer is None or self.trainer.state.fn != "fit":  # loaded for use, or for a test
            return
        check_resumable(checkpoint.get("hyper_parameters", {}), self.hparams)
        override_optimizer_settings(checkpoint, self.hparams, self.net)
        if state := checkpoint.get("cifar_lit"):
            rows, rank = state["device_sums"], self.trainer.global_rank
            if len(rows) != self.trainer.world_size:  # The first device continues with the sums of all.
                rows = [[sum(column) for column in zip(*rows, strict=True)]]
            if rank < len(rows):
                self.running = RunningMetrics(self.trainer.strategy.root_device, *rows[rank])
            loss, hits, images = map(float, state["epoch_sums"])
            self.running.epoch = [loss, hits, images]
            self.running.batches = int(any(images for *_, images in rows))  # the same on all devices
            self.logged_step = int(state["logged_step"])
            self.score = Score.from_dict(state["score"], self.hparams["num_classes"])
