"""`ImageClassifier`, the LightningModule: a net with its loss, metrics, optimizer and schedule."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from cifar_lit.hardware import keep_freed_memory
from cifar_lit.models.registry import build_net
from cifar_lit.models.tta import check_views, view_logits
from cifar_lit.training.callbacks import WeightAverage
from cifar_lit.training.initialise import initialise_from_images
from cifar_lit.training.metrics import Evaluation, PredictionCollector, Score, total_norm
from cifar_lit.training.optimizers import CHECKED, GROUP_SETTINGS, REST_MOMENTUM, build_optimizer, check_optimizer
from cifar_lit.training.resuming import saved_state, take_up
from cifar_lit.training.schedules import check_schedule, check_training, schedule_from
from cifar_lit.training.step import Sums, TrainingStep, Updates, can_capture, taken_over


class ImageClassifier(pl.LightningModule):
    """A net by name that is trained with cross-entropy.

    Args:
        net: name of the net, see README.
        input_shape: channels, height and width of the images; given by the data.
        num_classes: given by the data.
        width: multiplies the hidden widths of our nets.
        net_options: what else the net can be told, such as {widths: [32, 96, 96]} for `whitened`.
        label_smoothing: share of the target that is spread over all classes, 0 … 1.
        optimizer: sgd, adamw, or muon (filters orthogonalised; SGD for the rest).
        lr: highest learning rate; of the filters under muon.
        momentum: of SGD; of the filters under muon.
        nesterov: Nesterov's form of that momentum.
        weight_decay: on weights, not on biases and norms; coupled in SGD, decoupled in AdamW. Under muon the share that
            what is not a filter loses in a step at the highest rate.
        bias_lr, head_lr: under muon, rates of biases and norms, and of the last layer; lr if not given.
        rest_momentum: under muon, of the SGD part.
        rescale_filters: under muon, bring each filter tensor to the norm √outputs at every step.
        whiten_epochs: the rate of a whitening layer's bias falls to 0 in that many epochs; null for as the others.
        schedule: constant, cosine, one_cycle or triangular.
        schedule_every: step or epoch, how often the rate changes.
        warmup_epochs: epochs of linear rise before the schedule proper (may be a fraction).
        final_lr: rate at the end, as a fraction of lr.
        ema_decay: average the weights with this decay a step, validate and keep the average; 0 for none.
        channels_last: keep convolution weights in the memory order that CPUs and tensor cores prefer.
        compile: compile the net with torch.compile.
        capture: record a training step as a graph of the device, where it has such, and replay it.
        tta: test-time views, scored beside the plain accuracy: none, mirror, or full (mirror and shifts by a pixel).
    """

    def __init__(
        self,
        net: str = "resnet18",
        input_shape: list[int] | None = None,
        num_classes: int = 10,
        width: float = 1.0,
        net_options: dict[str, Any] | None = None,
        label_smoothing: float = 0.0,
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
        capture: bool = True,
        tta: str = "none",
    ) -> None:
        super().__init__()
        self.automatic_optimization = False  # `TrainingStep` makes many steps a call
        input_shape = list(input_shape or (3, 32, 32))
        self.save_hyperparameters()
        check_optimizer(optimizer, **{name: self.hparams[name] for name in CHECKED})
        check_schedule(schedule, final_lr)
        check_training(label_smoothing, schedule, schedule_every, warmup_epochs, ema_decay)
        check_views(tta)
        channels, *size = input_shape
        self.net: nn.Module = build_net(
            net, channels=channels, image_size=(size[0], size[1]), num_classes=num_classes, width=width, options=net_options
        )
        if channels_last:
            for parameter in self.net.parameters():
                if parameter.ndim == 4:
                    parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        if compile:
            self.net.compile()
        self.evaluation, self.views = Evaluation(num_classes), Evaluation(num_classes)
        self._outcomes = PredictionCollector()
        self.score: Score | None = None  # of the last validation or test
        self.views_score: Score | None = None  # of the last test, with test-time views
        self.outcomes: dict[str, Tensor] | None = None  # of each image of the last test or validation outside of a fit
        self.progress: dict[str, float] = {}  # what the bar shows
        self.sums = Sums(self.device)  # since the last log line, of this device and on it
        self.epoch_sums = [0.0, 0.0, 0.0]  # loss, hits and images of all devices in the epoch so far
        self.logged_step = 0
        self._updates = Updates()
        self._step: TrainingStep | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Lightning notes the name of each hook on the module some forty times a call of `training_step`: past nn.Module's
        checks, which saves about 0.07 ms a call.
        """
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes) of normalised float images (B, C, H, W), in the precision of the weights."""
        logits: Tensor = self.net(images.type(self.dtype))
        return logits

    @property
    def parameter_count(self) -> int:
        """How many numbers the net is made of."""
        return sum(parameter.numel() for parameter in self.net.parameters())

    def configure_callbacks(self) -> list[Callback]:
        """The average of the weights is part of the model's settings; clipping and accumulation become ours here."""
        self._updates = taken_over(self.trainer)
        return [WeightAverage(self.hparams["ema_decay"])] if self.hparams["ema_decay"] else []

    def configure_optimizers(self) -> Any:
        """Optimizer and schedule; the schedule spans the training that the Trainer is to make."""
        h = self.hparams
        settings = {name: h[name] for name in GROUP_SETTINGS if name not in ("optimizer", "lr")}
        slow = self.device.type == "cpu" and "bf16" not in str(self.trainer.precision)
        settings |= {"capturable": self.will_capture, "products": "float32" if slow else "bfloat16"}
        optimizer = build_optimizer(self.net, h["optimizer"], h["lr"], **settings)
        if h["schedule"] == "constant" and not h["warmup_epochs"] and h["whiten_epochs"] is None:
            return optimizer
        self.trainer.fit_loop.setup_data()
        steps_per_epoch = max(1, -(-self.batches_per_epoch() // self._updates.accumulate))
        limit, epochs = self.trainer.max_steps, self.trainer.max_epochs
        steps = limit if limit > 0 else steps_per_epoch * max(1, epochs or 1)
        schedule = schedule_from(optimizer, h, steps, steps_per_epoch)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": h["schedule_every"]}}

    @property
    def will_capture(self) -> bool:
        """Whether steps are to be recorded as graphs of the device."""
        return can_capture(self, self._updates)

    def batches_per_epoch(self) -> int:
        """Training batches of an epoch; the Trainer itself counts what the loader hands over, which may be several."""
        loader: Any = self.trainer.train_dataloader
        chunked = getattr(loader, "chunk", 1) > 1
        return int(loader.batch_count if chunked else self.trainer.num_training_batches)

    # ---- training

    def on_fit_start(self) -> None:
        """Brings the sums, new or from a checkpoint, to where the net is, and prepares net, step and memory."""
        if self.device.type == "cpu":
            keep_freed_memory()
        sums = self.sums
        self.sums = Sums(self.device, float(sums.loss), float(sums.hits), sums.images)
        initialise_from_images(self)
        self._step = TrainingStep(self, self._updates, self.will_capture)

    def on_fit_end(self) -> None:
        """Lets go of what was made for this fit."""
        self._step = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """An optimizer step for each batch of a chunk; a batch by itself is one. Returns the last one's mean loss."""
        assert self._step is not None
        ends_epoch = self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        batches = list(batch.batches()) if hasattr(batch, "batches") else [batch]
        for number, part in enumerate(batches, 1):
            last = ends_epoch and number == len(batches)
            self._step.run(part, last)
            if last or self._log_is_due:
                self._log_window(weight_norm=last)
        return self.sums.last.clone()  # which is written over by the next call's

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs what is left when the training ends in the middle of an epoch."""
        if self.sums.images and self.trainer.fit_loop.epoch_loop.done:
            self._log_window()

    @property
    def _log_is_due(self) -> bool:
        steps = self.global_step - self.logged_step
        return self.sums.images > 0 and steps >= self.trainer.log_every_n_steps  # type: ignore[attr-defined]

    def _log_window(self, weight_norm: bool = False) -> None:
        self.logged_step = self.global_step
        loss, hits, images = sums = self.window_sums()
        self.epoch_sums = [before + now for before, now in zip(self.epoch_sums, sums, strict=True)]
        self.sums.clear()
        rate = float(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.progress.update(loss=loss / images, accuracy=hits / images)
        norm = {"weight_norm": total_norm(self.net.parameters())} if weight_norm else {}
        self.log_values({"train/loss": loss / images, "train/accuracy": hits / images, "lr": rate, **norm})

    def window_sums(self) -> list[float]:
        """Loss, hits and images since the last log line, over all devices; raises NotFiniteLoss when they are not finite."""
        if self._step is not None:
            self._step.check()
        sums = torch.stack((self.sums.loss, self.sums.hits, self.sums.hits.new_tensor(self.sums.images)))
        return self.trainer.strategy.reduce(sums, reduce_op="sum").tolist()

    def on_train_epoch_end(self) -> None:
        """Starts the next epoch's sums; callbacks have read this one's, and checkpoints come after."""
        self.epoch_sums = [0.0, 0.0, 0.0]
        for config in self.trainer.lr_scheduler_configs:
            if config.interval == "epoch":
                config.scheduler.step()  # type: ignore[call-arg]

    def epoch_means(self) -> tuple[float, float]:
        """Mean training loss and accuracy over the epoch so far, all devices together."""
        loss, hits, images = self.epoch_sums
        return (loss / images, hits / images) if images else (float("nan"), float("nan"))

    def log_values(self, values: dict[str, float]) -> None:
        """Writes to the loggers at the current step; `self.log` would cost more than a small net's step."""
        for logger in self.trainer.loggers:
            logger.log_metrics({**values, "epoch": self.current_epoch}, self.global_step)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what an exact resume needs beyond Lightning's states: sums of the epoch, and the last score."""
        if self._log_is_due:  # a callback saves before it is logged; the row must not wait for the next step
            self._log_window()
        checkpoint["cifar_lit"] = saved_state(self)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes up what `on_save_checkpoint` added, and lets this model's settings win over the checkpoint's."""
        if self._trainer is not None and self._trainer.state.fn == "fit":  # else loaded for use, or for a test
            take_up(self, checkpoint)

    # ---- evaluation

    def on_validation_epoch_start(self) -> None:
        """Starts counting afresh, with the first device's running statistics of norms on all."""
        self.evaluation.reset()
        self.views.reset()
        self._outcomes.reset()
        if self.trainer.world_size > 1:
            for buffer in self.net.buffers():
                if buffer.is_floating_point():
                    torch.distributed.broadcast(buffer, 0)

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Counts one batch; outside of a fit every image's outcome is kept."""
        logits = self.forward(batch.images)
        self.evaluation.update(logits, batch.labels)
        if self.trainer.state.fn != "fit":
            self._outcomes.update(logits, batch.labels, batch.indices)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Counts one batch as it is and, if so set, by its test-time views."""
        self.validation_step(batch, batch_idx)
        if self.hparams["tta"] != "none":
            self.views.update(view_logits(self.net, batch.images.type(self.dtype), self.hparams["tta"]), batch.labels)

    def on_validation_epoch_end(self) -> None:
        """Makes the score known under `val/accuracy` and `val/loss`."""
        self._finish_evaluation("val")

    def on_test_epoch_end(self) -> None:
        """Makes the score known under `test/accuracy` and `test/loss`."""
        self.views_score = self.views.compute() if self.hparams["tta"] != "none" else None
        self._finish_evaluation("test")

    def _finish_evaluation(self, prefix: str) -> None:
        score = self.score = self.evaluation.compute()
        self.outcomes = self._outcomes.rows() if self._outcomes.update_called else None
        values = {f"{prefix}/loss": score.loss, f"{prefix}/accuracy": score.accuracy}
        self.log_dict(values, logger=False)  # for checkpoints and early stopping, which look it up by name
        self.progress[prefix] = score.accuracy
        if not self.trainer.sanity_checking:
            self.log_values(values)

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Probabilities (B, classes) with the rows of the images they belong to; padding is left out."""
        counted = batch.labels >= 0
        probabilities = self.forward(batch.images).float().softmax(1)
        return {"indices": batch.indices[counted], "labels": batch.labels[counted], "probabilities": probabilities[counted]}
