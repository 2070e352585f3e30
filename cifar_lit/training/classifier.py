"""`ImageClassifier`, the LightningModule: a net with its loss, metrics, optimizer and schedule."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics import Metric

from cifar_lit.base.errors import UsageError, check_choice
from cifar_lit.base.memory import keep_freed_memory, return_freed_memory
from cifar_lit.base.plugins import NameOrObject, is_import_path, part_name
from cifar_lit.base.settings import changed_settings, group_of, plain_settings, saved_settings
from cifar_lit.base.trust import TrustedNames
from cifar_lit.data.image_set import Batch, Pair, as_batch
from cifar_lit.models.fast_gradients import fast_gradients
from cifar_lit.models.registry import build_net, check_net, check_shapes, lay_out
from cifar_lit.training.loop import broadcast_from_first, steps_per_epoch
from cifar_lit.training.loss import build_loss
from cifar_lit.training.metrics import EVALUATIONS, VIEWS, PredictionCollector, view_logits
from cifar_lit.training.optimizers import align_restored_state, as_given, build_optimizer, optimizer_settings
from cifar_lit.training.rows import NotFiniteLoss, TrainingRows, check_finite, log_values
from cifar_lit.training.schedules import schedule_from, schedule_settings
from cifar_lit.training.score import Score
from cifar_lit.training.task import OneLabel, SeveralLabels, Task

DEFAULT_SHAPE = (3, 32, 32)
# Settings of the Trainer that change what is computed.
TRAINER_SETTINGS = (
    "max_epochs", "max_steps", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm",
    "limit_train_batches", "overfit_batches",
)  # fmt: skip


def check_model(h: Mapping[str, Any]) -> None:
    """Raise UsageError for settings of ImageClassifier that are invalid for all images. No net is built."""
    optimizer_settings(h["optimizer"], h["optimizer_options"])
    schedule_settings(h["schedule"], h["schedule_options"])
    if "." not in h["loss"]:
        check_choice("model.loss", h["loss"], ("cross_entropy", "an import path"))
    check_choice("model.tta", h["tta"], VIEWS)
    if not h["lr"] > 0:
        raise UsageError(f"the learning rate must be above 0, not {h['lr']:g}: set --lr")
    if not 0 <= h["label_smoothing"] < 1:
        raise UsageError(f"model.label_smoothing must be 0 or more and below 1, not {h['label_smoothing']:g}")
    temperature = h["temperature"]
    if temperature is not None and not temperature > 0:
        raise UsageError(f"model.temperature must be above 0, or null, not {temperature:g}")


class ImageClassifier(TrustedNames, pl.LightningModule):
    """An image classification net with cross-entropy loss, metrics, optimizer and schedule.

    Trains and tests on any datamodule or DataLoader with batches `(images, labels)`: normalised float images (B, C, H,
    W) and labels, int64 (B,), or with several labels an image float32 (B, classes); or with batches of the type
    `data.image_set.Batch`.

    Args:
        net: name of a net; or a class or a function (see `models.registry`), or the import path of one; or a torch
            module. A checkpoint does not contain it: pass it to `load_from_checkpoint` again.
        input_shape: channels, height and width of the images. Default: from the datamodule, else [3, 32, 32].
        num_classes: number of classes. Default: `class_count` of the datamodule.
        width: multiplier of the hidden widths of our nets.
        net_options: further options of the net, such as {widths: [32, 96, 96]} for `whitened`.
        lr: highest learning rate; with muon, that of the filters.
        optimizer: sgd, adamw, muon (Muon for filters, SGD for other parameters); or a torch optimizer, a class or a
            function (see `optimizers.build_optimizer`), or the import path of one.
        optimizer_options: settings of the optimizer by name, such as {momentum: 0.9, weight_decay: 0.0005}; see
            `SGDSettings`, `AdamWSettings` and `MuonSettings`.
        schedule: constant, cosine, one_cycle or triangular; or a torch scheduler, a class or a function (see
            `schedules.schedule_from`), or the import path of one.
        schedule_options: settings of the schedule by name, such as {warmup_epochs: 2}; see `ScheduleSettings`.
        loss: cross_entropy; or a `training.loss.Loss`, a class or a function that returns one, or the import path of
            one, which is called with `label_smoothing` if its signature has it.
        label_smoothing: share of the target spread over all classes, from 0 to below 1.
        temperature: divisor of the logits in `classify`, `serve` and exported files. Used with fewer than 20
            validation images; otherwise it is fitted on them. Losses are without it.
        tta: test-time augmentation, scored in addition to the plain accuracy: none, mirror, or full (mirror and 1-pixel
            shifts).
        metrics: additional torchmetrics for validation and test, by name. They receive logits (B, classes) and labels
            (B,). In Python also classes or import paths, called with `num_classes` if their signature has it.
        monitor: validation score that selects the best checkpoint: accuracy, balanced_accuracy, macro_f1, top5 (with
            more than five classes), loss (the lowest), or one of `metrics`. With several labels, the default is
            mean_average_precision.
        task: a `training.task.SeveralLabels` if an image has several labels. Default: that of the datamodule.

    Features set `loss.changes`, `regroup`, `class_balance` and `needs_length` in their `setup("fit")`; before it, each
    fit resets them.

    Attributes:
        regroup: changes the optimizer's parameter groups, see `optimizers.build_optimizer`.
        class_balance: weights with which a loss over all images counts the classes equally, float32 (classes,), if a
            feature balances the classes.
        needs_length: name of what depends on the number of epochs, which then cannot grow on resume.
        program: further settings by dotted name, which a program records in checkpoints and compares on resume.
        may_change: names among them that may change on resume.
        changes: for each resume with other settings than before: `step`, and the changed `settings` by name. They are
            stored in checkpoints, so that a change is forgotten if its steps are lost.
    """

    net: nn.Module
    weighs_batches = True  # tells ImageData that this module supports `Batch.loss_weight` and padded labels

    def __init__(
        self,
        net: NameOrObject | nn.Module = "resnet18",
        input_shape: list[int] | None = None,
        num_classes: int | None = None,
        width: float = 1.0,
        net_options: dict[str, Any] | None = None,
        lr: float = 0.1,
        optimizer: NameOrObject = "sgd",
        optimizer_options: dict[str, Any] | None = None,
        schedule: NameOrObject = "constant",
        schedule_options: dict[str, Any] | None = None,
        loss: NameOrObject = "cross_entropy",
        label_smoothing: float = 0.0,
        temperature: float | None = None,
        tta: str = "none",
        metrics: dict[str, Metric] | None = None,
        monitor: str | None = None,
        task: SeveralLabels | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["metrics", "net", "optimizer", "schedule", "loss", "task"])
        parts = {"net": net, "optimizer": optimizer, "schedule": schedule, "loss": loss}
        self.hparams.update({name: part_name(part) for name, part in parts.items()})
        self._objects = {name: part for name, part in parts.items() if not isinstance(part, str)}
        check_model(self.hparams)
        self._metrics = metrics
        self.task: Task = OneLabel()
        self.hparams["task"] = None
        if task is not None:
            self._set_task(group_of(SeveralLabels, task, "model.task"))
        if isinstance(net, nn.Module):
            self.hparams["net"] = type(net).__name__
        elif not isinstance(net, str) or is_import_path(net):
            check_net(net, net_options or {})
        self.loss = build_loss(loss, label_smoothing)
        self.rows = TrainingRows(self, self.device)
        self._collector = PredictionCollector()
        self.program: dict[str, object] = {}
        self.may_change: list[str] = []
        self.changes: list[dict[str, object]] = []
        self.score: Score | None = None  # last validation or test
        self.views_score: Score | None = None  # last test, with test-time augmentation
        self.predictions: dict[str, Tensor] | None = None  # last test, or validation outside of a fit
        self._reset_features()
        if num_classes is not None:
            self._build(input_shape, num_classes)

    def _build(self, given_shape: Sequence[int] | None, num_classes: int) -> None:
        """Build net and metrics."""
        h = self.hparams
        input_shape = list(given_shape or DEFAULT_SHAPE)
        h.update(input_shape=input_shape, num_classes=num_classes)
        net = self.part("net")
        name = part_name(net)
        if not isinstance(net, nn.Module):
            channels, height, width = input_shape
            shape: dict[str, Any] = {"channels": channels, "image_size": (height, width), "num_classes": num_classes}
            net = build_net(net, **shape, width=h["width"], options=h["net_options"])
        self.net = net
        lay_out(net, name)
        check_shapes(net, name, input_shape, num_classes)
        evaluation = EVALUATIONS[type(self.task)]
        self.evaluation, self.views = evaluation(num_classes, self._metrics), evaluation(num_classes)
        self._collector = PredictionCollector(self.task)
        self.loss.task = self.task
        h["monitor"] = h["monitor"] or self.task.monitor
        check_choice("model.monitor", h["monitor"], self.evaluation.names)

    def _set_task(self, task: SeveralLabels) -> None:
        self.task = task
        self.hparams["task"] = asdict(task)

    def part(self, name: str) -> Any:
        """Return the net, optimizer or schedule as it was given: a name, a class, a function or an object."""
        return self._objects.get(name, self.hparams[name])

    def build_for(self, data: object) -> None:
        """Build net and metrics for a datamodule, unless they are built. Raise UsageError without `class_count`."""
        if self.hparams["num_classes"] is not None:
            return
        if not hasattr(data, "class_count"):
            raise UsageError("the number of classes is unknown: use ImageClassifier(num_classes=…)")
        shape = self.hparams["input_shape"] or getattr(data, "input_shape", None)
        if self.hparams["task"] is None and getattr(data, "has_several_labels", False):
            self._set_task(SeveralLabels())
        self._build(shape, int(data.class_count))

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, classes) for normalised float images (B, C, H, W), in the dtype of the weights."""
        return self.net(images.type(self.dtype))

    # ---- training

    def training_step(self, batch: Batch | Pair, batch_idx: int) -> Tensor:
        """Return the mean loss of a batch, multiplied by its `loss_weight` (see `data.image_set.Batch`)."""
        batch = as_batch(batch)
        with fast_gradients(batch.images):
            logits = self(batch.images)
        loss: Tensor = self.loss(logits, batch)
        self.rows.add(loss, logits, batch)
        if self.device.type == "cpu":
            self._check_loss(loss)
        if batch.loss_weight != 1.0:
            loss = loss * batch.loss_weight
        return loss

    def _check_loss(self, loss: Tensor) -> None:
        """Raise NotFiniteLoss. On an accelerator, reading each loss would wait for the device: `rows` checks them."""
        if torch.is_anomaly_enabled():  # torch's own error names the operation
            return
        value = loss.item()
        if not math.isfinite(value):
            raise NotFiniteLoss(f"the loss is {value} at step {self.global_step} of epoch {self.current_epoch}")

    def configure_optimizers(self) -> object:
        """Return the optimizer and its schedule, which spans the whole training.

        Raises UsageError for a schedule if the training has no limit.
        """
        h, trainer = self.hparams, self.trainer
        optimizer = build_optimizer(
            self.net, self.part("optimizer"), h["lr"], h["optimizer_options"],
            precision=str(trainer.precision), regroup=self.regroup,
        )  # fmt: skip
        schedule, options = self.part("schedule"), h["schedule_options"] or {}
        if schedule == "constant" and not options.get("warmup_epochs"):
            return optimizer
        trainer.fit_loop.setup_data()  # sets num_training_batches; Lightning's estimate may skip this
        steps = trainer.estimated_stepping_batches
        if steps == math.inf:
            remedy = "set --epochs or --trainer.max_steps, or --model.schedule constant"
            raise UsageError(f"a schedule needs an end: {remedy}")
        built = schedule_from(optimizer, schedule, options, int(steps), steps_per_epoch(trainer))
        every = options.get("every", "step")
        if isinstance(built, ReduceLROnPlateau):
            every = "epoch"
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": built, "interval": every, "monitor": "val/loss"}}

    def configure_callbacks(self) -> list[Callback]:
        """Build the net from the datamodule unless it is built, and reset what features set."""
        launcher = self.trainer.strategy.launcher
        if launcher is not None and launcher.is_interactive_compatible:  # Lightning forked this process in a notebook
            torch.set_num_threads(1)  # it would wait for OpenMP threads that only its parent has
            if self.hparams["num_classes"] is None:
                remedy = "use ImageClassifier(num_classes=data.class_count, input_shape=data.input_shape)"
                raise UsageError(f"forked processes train only a net that is built before they start: {remedy}")
        self.build_for(self.trainer.datamodule)  # type: ignore[attr-defined]
        self._reset_features()
        return []

    def _reset_features(self) -> None:
        """Reset what features set in their `setup`, which Lightning calls before that of the module."""
        self.loss.changes.clear()
        self.regroup = as_given
        self.class_balance: Tensor | None = None
        self.needs_length: str | None = None
        if self.hparams["schedule"] != "constant":
            self.needs_length = f"model.schedule {self.hparams['schedule']}"

    def setup(self, stage: str) -> None:
        """Reset the state of an earlier fit."""
        if stage == "fit":
            self.changes = []
            self.rows = TrainingRows(self, self.trainer.strategy.root_device)

    def on_fit_start(self) -> None:
        """Configure whether freed memory is kept."""
        if getattr(self.trainer.datamodule, "reads_ahead", False):  # type: ignore[attr-defined]
            return_freed_memory()  # the images do not fit into memory
        elif self.device.type == "cpu":
            keep_freed_memory()

    def on_train_start(self) -> None:
        """Align the state of restored optimizers."""
        for optimizer in self.trainer.optimizers:
            align_restored_state(optimizer)

    def on_train_batch_end(self, outputs: object, batch: Batch | Pair, batch_idx: int) -> None:
        """Log a row of the training curves if it is due."""
        if values := self.rows.after_step():
            self.log_dict(values, prog_bar=True, logger=False, on_step=True, on_epoch=False)

    def on_train_epoch_end(self) -> None:
        """Log the means of the epoch for callbacks such as EarlyStopping."""
        self._log_scalars(self.rows.epoch_means(), logger=False)
        self.rows.epoch = [0.0, 0.0, 0.0]

    def _log_scalars(self, values: Mapping[str, float], **settings: Any) -> None:
        """Log values that are equal on all devices. They are reduced by `max`, which is exact, unlike `mean`."""
        device = self.device if self.trainer.world_size > 1 else "cpu"  # MPS does not support float64
        tensors = {name: torch.tensor(value, dtype=torch.float64, device=device) for name, value in values.items()}
        self.log_dict(tensors, on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True, batch_size=1, **settings)

    # ---- evaluation

    @property
    def monitored(self) -> tuple[str, str]:
        """Name of the score that selects the best checkpoint, such as `val/accuracy`, and its mode, `max` or `min`."""
        name = self.hparams["monitor"]
        further = self.evaluation.further
        mode = "max"
        if name in ("loss", "hamming_loss") or (name in further and further[name].higher_is_better is False):
            mode = "min"
        return f"val/{name}", mode

    def on_validation_epoch_start(self) -> None:
        """Reset the metrics, and broadcast the running statistics of norms from the first device."""
        for metric in (self.evaluation, self.views, self._collector):
            metric.reset()
        statistics = [buffer for buffer in self.net.buffers() if buffer.is_floating_point()]
        broadcast_from_first(self.trainer, *statistics)

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: Batch | Pair, batch_idx: int) -> None:
        """Score one batch. Outside of a fit, also keep the prediction of each image if the batch has `indices`."""
        self._evaluated(batch)

    def test_step(self, batch: Batch | Pair, batch_idx: int) -> None:
        """Score one batch, also with test-time augmentation if `tta` is set.

        It computes without autocast, in float32 as the net of `model.safetensors` does.
        """
        with torch.autocast(self.device.type, enabled=False):
            plain = self._evaluated(batch)
            views = self.hparams["tta"]
            if views != "none":
                images, labels = batch
                self.views.update(view_logits(self.net, images.type(self.dtype), views, plain), labels)

    def _evaluated(self, batch: Batch | Pair) -> Tensor:
        batch = as_batch(batch)
        logits = self(batch.images)
        self.evaluation.update(logits, batch.labels)
        if self.trainer.state.fn != "fit" and len(batch.indices):
            self._collector.update(logits, batch.labels, batch.indices)
        return logits

    def on_validation_epoch_end(self) -> None:
        """Log the scores as `val/accuracy`, `val/loss` and so on, or as `test/…` in a test."""
        self.score = self.evaluation.compute()
        self.predictions = None
        if self._collector.update_called:
            self.predictions = self._collector.predictions()
        stage = "val"
        if self.trainer.testing:
            stage = "test"
        if self.views.loss.update_called:
            self.views_score = self.views.compute()
        scores = self.score.logged(stage)
        in_fit = self.trainer.state.fn == "fit"
        if in_fit:
            if not self.trainer.sanity_checking:
                # self.log would record the scores one step too early.
                log_values(self.trainer, scores, self.current_epoch, self.global_step)
            if not math.isfinite(self.score.loss):  # Never select such weights as the best.
                scores |= {"val/accuracy": math.nan, self.monitored[0]: math.nan}
        accuracy = f"{stage}/accuracy"
        self._log_scalars({accuracy: scores.pop(accuracy)}, prog_bar=True, logger=not in_fit)
        self._log_scalars(scores, logger=not in_fit)

    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: Batch | Pair, batch_idx: int) -> dict[str, Tensor]:
        """Return `probabilities` (B, classes) of a batch without padding, and its `labels` and `indices`, if any.

        They are computed as in a test.
        """
        with torch.autocast(self.device.type, enabled=False):
            if isinstance(batch, Tensor):
                return {"probabilities": self.task.probabilities(self(batch).float())}
            batch = as_batch(batch)
            counted = self.task.counted(batch.labels)
            probabilities = self.task.probabilities(self(batch.images).float())
            values = {"labels": batch.labels, "probabilities": probabilities}
            if len(batch.indices):
                values["indices"] = batch.indices
            return {name: value[counted] for name, value in values.items()}

    # ---- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the running metrics and the last score. Raise NotFiniteLoss for values that are not finite."""
        self.rows.before_checkpoint()
        check_finite(self, checkpoint)
        if self._trainer is None:  # The fit ran in worker processes. Only its weights have come back.
            return
        score = None
        if self.score:
            score = {**self.score._asdict(), "confusion": torch.tensor(self.score.confusion)}
        checkpoint["cifar_lit"] = {
            **self.rows.state_dict(),
            "settings": json.dumps(self._settings()),
            "changes": self.changes,
            "score": score,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the running metrics and score of a resumed fit. Raise UsageError for settings that must be equal."""
        if self._trainer is None or self.trainer.state.fn != "fit":
            return
        if self.trainer.precision == "64-true":
            self.double()  # Lightning converts the weights after it has loaded them, which would round them
        state = checkpoint["cifar_lit"]
        self.changes = list(state["changes"])
        changed = self.changes_since(checkpoint, self.trainer.datamodule)  # type: ignore[attr-defined]
        if changed:
            self.changes.append({"step": checkpoint["global_step"], "settings": changed})
        self.rows.load_state_dict(state)
        self.score = Score.from_dict(state["score"])

    def changes_since(self, checkpoint: Mapping[str, Any], data: object) -> dict[str, object]:
        """Return the settings of model, data, Trainer and program that differ from those of a checkpoint.

        Raises:
            UsageError: if one must not change.
        """
        saved = saved_settings(checkpoint["cifar_lit"])
        if "ImageData" in checkpoint:
            saved |= saved_settings(checkpoint["ImageData"])
        given = {**self._settings(), **getattr(data, "given", {})}
        may_change = [*self.may_change, *getattr(data, "may_change", ())]
        return changed_settings(saved, given, may_change, self.needs_length)

    def _settings(self) -> dict[str, object]:
        """Return the settings of program and model, and of the Trainer in a fit, by dotted name."""
        settings = {**self.program, **plain_settings("model", self.hparams)}
        for name in ("num_classes", "input_shape", "task", "monitor"):
            if self.hparams[name] is None:  # it comes from the data
                del settings[f"model.{name}"]
        if self._trainer is not None:
            limits = {name: getattr(self.trainer, name) for name in TRAINER_SETTINGS}
            settings |= plain_settings("trainer", limits)
        return settings
