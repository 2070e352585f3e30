"""`ImageClassifier`, the LightningModule: a net with its loss, metrics, optimizer and schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from inspect import signature
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import get_total_norm
from torchmetrics import Metric

from cifar_lit.errors import UsageError, check_choice
from cifar_lit.hardware import MAX_FLOATS, keep_freed_memory, return_freed_memory
from cifar_lit.models.registry import build_net, check_net, check_shapes
from cifar_lit.models.tta import VIEWS, view_logits
from cifar_lit.models.whitened import WhitenedNet
from cifar_lit.plugins import import_callable, is_import_path
from cifar_lit.training.callbacks import EarlyStop, NotFiniteLoss, WeightAverage, check_finite, gather_rows
from cifar_lit.training.cuda_graph import EndOfGraphs, GraphedSteps, can_capture
from cifar_lit.training.finetune import HeadFit, load_pretrained
from cifar_lit.training.metrics import Evaluation, PredictionCollector, RunningMetrics, Score
from cifar_lit.training.optimizers import (
    GROUP_SETTINGS,
    REST_MOMENTUM,
    build_optimizer,
    check_restored_state,
    check_settings,
    override_optimizer_settings,
)
from cifar_lit.training.schedules import schedule_from

WHITENING_IMAGES = 5_000  # as the records do (Jordan, airbench, 2024)

CLASS_WEIGHTS = ("none", "balanced", "effective")
BETA = 0.999  # of the effective number of samples, as its authors take it for ImageNet and iNaturalist


def class_weights(counts: Tensor, kind: str) -> list[float]:
    """The weights of the classes' images in the loss: with a mean of 1 over all training images, 0 of a class without any.

    counts: of training images, int64 (classes,). kind: balanced, one over the count; or effective, one over the effective number
    of samples (1 − βⁿ) / (1 − β) of n, which for many is little more than for some (Cui et al., Class-Balanced Loss, CVPR 2019).
    """
    sizes = counts.double() if kind == "balanced" else (1 - BETA ** counts.double()) / (1 - BETA)
    weights = torch.where(counts > 0, 1 / sizes, 0.0)
    return (weights * (counts.sum() / (weights * counts).sum())).tolist()


def hold_norms(net: nn.Module) -> None:
    """Has batch norms normalise by their running statistics, and leave these as they are, while the rest is trained."""
    for module in net.modules():
        if isinstance(module, _BatchNorm):
            module.eval()


def images_to_whiten(data: Any) -> Tensor:
    """The training images that a whitening layer is computed from, as they are; no more than a GB of float32 holds."""
    return data.plain_images(min(WHITENING_IMAGES, max(1, MAX_FLOATS // math.prod(data.input_shape))))


def _schedule_kind(h: Mapping[str, Any]) -> tuple[object, ...]:
    """What must not change in mid-training: a checkpoint counts the schedule's steps, and has a rate for each group of layers."""
    timed = h.get("schedule", "constant") != "constant" or h.get("warmup_epochs") or h.get("whiten_epochs") is not None
    return bool(timed), h.get("schedule_every", "step"), h.get("frozen", 0.0), h.get("input_lr") is None


def check_model(settings: Mapping[str, Any]) -> None:
    """Raise UsageError for settings of ImageClassifier that are invalid for any images; builds nothing.

    Imports a net and an optimizer that are named by their import paths.
    """
    check_net(settings["net"], settings["net_options"] or {})
    if is_import_path(settings["optimizer"]):
        import_callable(settings["optimizer"])
    _check_choices(settings)
    check_choice("model.monitor", settings["monitor"], [*Evaluation(num_classes=6).names, *(settings["metrics"] or {})])


def _check_choices(h: Mapping[str, Any]) -> None:
    check_settings(h)
    check_choice("model.tta", h["tta"], VIEWS)
    check_choice("model.class_weights", h["class_weights"], CLASS_WEIGHTS)
    if h["head_views"] < 0 or not (h["unfreeze"] or (h["weights"] and h["head_views"])):
        raise UsageError("model.unfreeze false fits the last layer alone: set model.weights, and model.head_views above 0")
    if h["frozen"] and not h["weights"]:
        raise UsageError("model.frozen keeps pretrained layers as they are: set model.weights, or leave it at 0")


class ImageClassifier(pl.LightningModule):
    """A net by name that is trained with cross-entropy.

    Args:
        net: name of a net, or the import path of a class or function; see `models.registry`.
        input_shape: channels, height and width of the images; given by the data.
        num_classes: given by the data.
        width: multiplies the hidden widths of our nets.
        net_options: what else the net can be told, such as {widths: [32, 96, 96]} for `whitened`.
        label_smoothing: share of the target that is spread over all classes, 0 … 1.
        class_weights: for unequal classes: none; balanced, an image's training loss counts by one over the number of training
            images of its class; or effective, by one over their effective number, which evens out less. Validation and
            test count every image alike.
        optimizer: sgd, adamw, muon (filters orthogonalised; SGD for the rest).
        lr: highest learning rate; of the filters under muon.
        momentum: of SGD; of the filters under muon.
        nesterov: Nesterov's form of that momentum.
        weight_decay: on weights, not on biases and norms; coupled in SGD, decoupled in AdamW. Under muon the share that
            what is not a filter loses in a step at the highest rate.
        bias_lr, head_lr: under muon, rates of biases and norms, and of the last layer; lr if not given.
        rest_momentum: under muon, of the SGD part.
        rescale_filters: under muon, bring each filter tensor to the norm √outputs at every step.
        whiten_epochs: the rate of a whitening layer's bias falls to 0 in that many epochs, and from then on it costs no time;
            null for as the others.
        schedule: constant, cosine, one_cycle or triangular.
        schedule_every: step or epoch, how often the rate changes.
        warmup_epochs: epochs of linear rise before the schedule proper (may be a fraction).
        final_lr: rate at the end, as a fraction of lr.
        ema_decay: average the weights with this decay a step, validate and keep the average; 0 for none.
        channels_last: keep convolution weights in the memory order that CPUs and tensor cores prefer.
        compile: compile the net with torch.compile.
        capture: replay a training step from a graph of the device (CUDA), where nothing has to look in between.
        tta: test-time views, scored beside the plain accuracy: none, mirror, or full (mirror and shifts by a pixel).
        weights: pretrained ones to start from: imagenet, or a file (.safetensors, .pth); null for random ones.
        head_views: of pretrained weights, how often each training image is looked at by the frozen net, once as it is and then
            augmented, to fit the last layer on its features before anything else is trained; 0 leaves that layer random.
        unfreeze: after that, train the net; false for the last layer alone.
        frozen: share of the net's parameters, from the input on, that keep their pretrained values; they are left out of the
            backward pass, which in the first layers costs most.
        input_lr: rate of the first layers that are trained, which rises in equal ratios to lr in the last ones; null for lr.
        fixed_norms: leave the running statistics of batch norms as they are, and normalise by them in training too.
        metrics: further torchmetrics for validation and test by name, given logits (B, classes) and labels (B,).
        monitor: the figure of the validation that the best checkpoint is chosen by: accuracy, balanced_accuracy, macro_f1,
            top5 (of more than five classes), loss (the lowest), or one of `metrics`.
        patience: end the training when that figure has not become better in so many validations, or, below 1, in that share of
            them; 0 to train to the end. An EarlyStopping among the Trainer's callbacks takes its place.
    """

    def __init__(
        self,
        net: str = "resnet18",
        input_shape: list[int] | None = None,
        num_classes: int = 10,
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
        input_shape = list(input_shape or (3, 32, 32))
        self.save_hyperparameters(ignore=["metrics"])
        _check_choices(self.hparams)
        channels, *size = input_shape
        shape: dict[str, Any] = {"channels": channels, "image_size": tuple(size), "num_classes": num_classes}
        self.net: nn.Module = build_net(net, **shape, width=width, options=net_options)
        if channels_last:
            for parameter in self.net.parameters():
                if parameter.ndim == 4:
                    parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        check_shapes(self.net, net, input_shape, num_classes)
        parameters = list(self.net.parameters())
        for parameter in parameters[: int(frozen * len(parameters))]:
            parameter.requires_grad_(False)
        if compile:
            self.net.compile(dynamic=False)  # a graph for each size, rather than a slower one for all
        self.running = RunningMetrics(self.device)  # of this device's training steps
        self.logged_step = 0
        self.evaluation, self.views = Evaluation(num_classes, metrics), Evaluation(num_classes)
        check_choice("model.monitor", monitor, self.evaluation.names)
        self._collector = PredictionCollector()
        self.score: Score | None = None  # of the last validation or test
        self.views_score: Score | None = None  # of the last test, with test-time views
        self.predictions: dict[str, Tensor] | None = None  # of the last test or validation outside of a fit
        self.progress: dict[str, float] = {}  # what the bar shows
        self.class_weights: Tensor | None = None  # float32 (classes,) in a fit that weighs them
        self._graphs: GraphedSteps | None = None
        self._whitening_schedule: Any = None  # until its end, where the fit can leave that bias's gradient out from then on
        self.last_losses: Tensor | None = None  # float32 (images,) in a fit whose data choose images by them
        self._reads_losses = True  # in every step; on other devices than CPUs that would wait for them

    def __setattr__(self, name: str, value: Any) -> None:
        """Lightning notes each hook's name on the module some forty times a step: past nn.Module's checks, which cost more."""
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes) of normalised float images (B, C, H, W), in the precision of the weights."""
        return self.net(images.type(self.dtype))

    # ---- training

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The mean loss of a batch, weighted so that devices with unequal parts of it give its gradient; see `Batch`."""
        logits, smoothing = self(batch.images), self.hparams["label_smoothing"]
        targets = batch.labels if batch.targets is None else batch.targets
        if self.class_weights is None and self.last_losses is None:
            loss = F.cross_entropy(logits, targets, label_smoothing=smoothing)
        else:
            losses = F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="none")
            if self.last_losses is not None and batch.loss_weight:
                self.last_losses[batch.indices] = losses.detach().float()
            if self.class_weights is not None:
                # Each image's whole loss by its class's weight, over the number of images. `F.cross_entropy(weight=…)` divides by
                # the weights of this device's part, and weighs what smoothing spreads too, which pulls all to the rare classes.
                losses *= self.class_weights[batch.labels] if batch.targets is None else batch.targets @ self.class_weights
            loss = losses.mean()
        if batch.loss_weight:
            self.running.update(loss.detach(), logits, batch.labels)
        if not self._reads_losses:
            self.running.watch(loss.detach())
        elif not math.isfinite(value := loss.item()):
            raise self._not_finite(f"{value}", self.global_step)
        return loss if batch.loss_weight == 1.0 else loss * batch.loss_weight

    training_step.__signature__ = signature(training_step)  # type: ignore[attr-defined]  # which Lightning asks for at each step

    def configure_optimizers(self) -> Any:
        """Optimizer and schedule; the schedule spans the training that the Trainer is to make."""
        h, trainer = self.hparams, self.trainer
        settings = {name: h[name] for name in GROUP_SETTINGS}
        captures = can_capture(trainer, h["capture"])
        optimizer = build_optimizer(self.net, precision=str(trainer.precision), capturable=captures, **settings)
        if h["schedule"] == "constant" and not h["warmup_epochs"] and h["whiten_epochs"] is None:
            return optimizer
        trainer.fit_loop.setup_data()  # which the estimate leaves out where there is no limit of epochs
        steps = trainer.estimated_stepping_batches
        if steps == math.inf:
            raise UsageError("a schedule must know its end: set --epochs or --trainer.max_steps, or --model.schedule constant")
        steps_per_epoch = max(1, -(-int(trainer.num_training_batches) // trainer.accumulate_grad_batches))
        schedule = schedule_from(optimizer, h, int(steps), steps_per_epoch)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": h["schedule_every"]}}

    def configure_callbacks(self) -> list[Callback]:
        """What the model's settings ask for: average of the weights, fit of the last layer, early stopping, capture of steps."""
        h = self.hparams
        callbacks: list[Callback] = [WeightAverage(h["ema_decay"])] if h["ema_decay"] else []
        if h["weights"] and h["head_views"]:
            callbacks.append(HeadFit(h["head_views"], h["unfreeze"]))
        stopping = [each for each in self.trainer.callbacks if isinstance(each, EarlyStopping)]  # type: ignore[attr-defined]
        if h["patience"] and all(isinstance(each, EarlyStop) for each in stopping):  # a user's own EarlyStopping takes precedence
            callbacks.append(EarlyStop(*self.monitored, h["patience"]))
        return [*callbacks, *([EndOfGraphs()] if h["capture"] else [])]

    def on_fit_start(self) -> None:
        """Brings the running metrics, new or from a checkpoint, to where the net is, and prepares net and steps."""
        self.on_fit_end()  # which a fit that failed has not come to
        if self.hparams["fixed_norms"]:
            hold_norms(self)  # the Trainer does not call `train()` at a fit's start
        running, self.running = self.running, RunningMetrics(self.device, *self.running.sums()[:3].tolist())
        self.running.epoch, self.running.batches = running.epoch, running.batches
        if getattr(self.trainer.datamodule, "reads_ahead", False):  # type: ignore[attr-defined]
            return_freed_memory()  # the images do not fit, so that memory is worth more than time
        elif self.device.type == "cpu":
            keep_freed_memory()
        self.class_weights = self._weights_of_classes()
        last_losses = getattr(self.trainer.datamodule, "last_losses", None)  # type: ignore[attr-defined]
        self.last_losses = last_losses.latest if last_losses else None
        if can_capture(self.trainer, self.hparams["capture"]):
            self._graphs = GraphedSteps(self)
        self._reads_losses = self.device.type == "cpu" and self._graphs is None
        if not self._reads_losses and getattr(self.trainer.precision_plugin, "scaler", None) is None:  # which does the same
            for optimizer in self.trainer.optimizers:  # from a loss that is not finite on, steps change nothing
                optimizer.found_inf = self.running.non_finite  # type: ignore[attr-defined]
        # clipping would count the gradient that is left out, and several devices wait for it
        if self.hparams["whiten_epochs"] and not self.trainer.gradient_clip_val and self.trainer.world_size == 1:
            self._whitening_schedule = self.trainer.lr_scheduler_configs[0].scheduler
        if self._graphs and not self.trainer.ckpt_path:
            self._graphs.rehearse(self._example_batches())

    def _weights_of_classes(self) -> Tensor | None:
        """The weights of the classes in the loss on this device; None where all images count alike."""
        kind, data = self.hparams["class_weights"], self.trainer.datamodule  # type: ignore[attr-defined]
        if kind == "none":
            return None
        if not hasattr(data, "class_counts"):
            raise UsageError(f"model.class_weights {kind} counts the training images: fit a datamodule that has class_counts")
        return torch.tensor(class_weights(data.class_counts, kind), device=self.device)

    def _example_batches(self) -> Iterator[Any]:
        """Batches of all shapes that the fit will meet, the largest first; the net meanwhile is as it will be then."""
        net: Any = self.net
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        ends = self.hparams["whiten_epochs"] if self._whitening_schedule else math.inf
        if hasattr(data, "example_batches"):
            epochs = range(data.epochs or 1)
            kinds = {(data.side(epoch), final) for epoch in epochs for final in (epoch >= ends, epoch + 1 > ends)}
            for side, net.bias_is_final in sorted(kinds, key=lambda kind: (kind[0] or math.inf, kind[1]), reverse=True):
                yield from data.example_batches(side)
            net.bias_is_final = False

    def load_pretrained(self) -> None:
        """Puts the weights that are set into the net; see `training.finetune.load_pretrained` for what it raises."""
        load_pretrained(self.net, self.hparams["net"], self.hparams["weights"])

    def train(self, mode: bool = True) -> ImageClassifier:
        """Training mode, in which `fixed_norms` leaves batch norms as they are in evaluation."""
        super().train(mode)
        if mode and self.hparams["fixed_norms"]:
            hold_norms(self)
        return self

    def on_train_start(self) -> None:
        """Check restored optimizers, then initialise here so that it counts towards training time, as in airbench."""
        for optimizer in self.trainer.optimizers:
            check_restored_state(optimizer)
        self._initialise_from_images()

    def _initialise_from_images(self) -> None:
        """Computes the first layer of a net that whitens its images: on the first device, and from there on all."""
        net, data = self.net, self.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(net, WhitenedNet) or bool(net.whitened):
            return
        if data is None:
            raise UsageError(f"{self.hparams['net']} is initialised from training images: fit it with a datamodule")
        if self.trainer.is_global_zero:
            net.initialise(images_to_whiten(data).to(net.whiten.weight))
        net.whiten.weight.data.copy_(self.trainer.strategy.broadcast(net.whiten.weight.detach()))
        net.whitened.fill_(True)

    def on_fit_end(self) -> None:
        """Lets go of the captured steps, before the net leaves the device, and leaves gradients to all who ask for them."""
        self._graphs = self._whitening_schedule = None
        if isinstance(self.net, WhitenedNet):
            self.net.bias_is_final = False

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Lightning's own step (forward, backward, clipping, update), or the same replayed from a graph."""
        if self._graphs is None:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        else:
            self._graphs.step(optimizer_closure)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Counts the images, which a replayed step could not."""
        self.running.images += len(batch.labels) if batch.loss_weight else 0
        self.running.batches += 1
        if self._whitening_schedule is not None and self._whitening_schedule.whitening_ended:
            net: Any = self.net
            net.bias_is_final, self._whitening_schedule = True, None
        if self._graphs is not None:
            self._graphs.batch = batch

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs a row when it is due, at the end of an epoch, and at the end of a training."""
        loop = self.trainer.fit_loop.epoch_loop
        if self.running.batches and (self._row_is_due or loop.batch_progress.is_last_batch or loop.done):
            self._log_row()

    @property
    def _row_is_due(self) -> bool:
        every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        return every > 0 and self.global_step - self.logged_step >= every

    def _log_row(self) -> None:
        loss, hits, images = sums = self._device_sums().sum(0).tolist()
        self.running.epoch = [before + now for before, now in zip(self.running.epoch, sums, strict=True)]
        self.running.start_row()
        self.logged_step = self.global_step
        self.progress.update(loss=loss / images, accuracy=hits / images)
        group = self.trainer.optimizers[0].param_groups[0]
        rate = float(group["lr"])
        if self.hparams["input_lr"] is not None:  # this group is of the first layers: model.lr is that of the last ones
            rate *= self.hparams["lr"] / float(group.get("initial_lr", rate))
        values = {"train/loss": loss / images, "train/accuracy": hits / images, "lr": rate}
        if self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            values["weight_norm"] = float(get_total_norm([parameter.detach() for parameter in self.net.parameters()]))
        self._write_values(values)

    def _device_sums(self) -> Tensor:
        """Loss, hits and images of each device since the last row, (devices, 3); raises NotFiniteLoss where a loss was not."""
        rows = gather_rows(self.trainer, self, self.running.sums()).cpu()
        if rows[:, 3].any():
            steps = int(self.running.finite_steps) // self.trainer.accumulate_grad_batches  # batches were counted
            raise self._not_finite("not finite", self.logged_step + steps)
        return rows[:, :3]

    def _not_finite(self, what: str, step: int) -> NotFiniteLoss:
        return NotFiniteLoss(f"the loss is {what} at step {step} of epoch {self.current_epoch}")

    def on_train_epoch_end(self) -> None:
        """Makes the epoch's means known to callbacks that watch them, and starts the next epoch's."""
        loss, accuracy = self.running.epoch_means()
        self.log_dict({"train/loss": loss, "train/accuracy": accuracy}, logger=False)
        self.running.epoch = [0.0, 0.0, 0.0]

    def _write_values(self, values: dict[str, float]) -> None:
        """Writes to the loggers at the current step; `self.log` in each step would cost more than a small net's step."""
        for logger in self.trainer.loggers:
            logger.log_metrics({**values, "epoch": self.current_epoch}, self.global_step)

    # ---- evaluation

    @property
    def monitored(self) -> tuple[str, str]:
        """What the best checkpoint is chosen by, such as `val/accuracy`, and whether the `max` or the `min` of it is best."""
        name = self.hparams["monitor"]
        lowest = name == "loss" or (name in self.evaluation.metrics and self.evaluation.metrics[name].higher_is_better is False)
        return f"val/{name}", "min" if lowest else "max"

    def on_validation_epoch_start(self) -> None:
        """Starts counting afresh, with the first device's running statistics of norms on all."""
        for counter in (self.evaluation, self.views, self._collector):
            counter.reset()
        if self.trainer.world_size > 1:
            for buffer in self.net.buffers():
                if buffer.is_floating_point():
                    torch.distributed.broadcast(buffer, 0)

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Counts one batch; outside of a fit every image's prediction is kept."""
        logits = self(batch.images)
        self.evaluation.update(logits, batch.labels)
        if self.trainer.state.fn != "fit":
            self._collector.update(logits, batch.labels, batch.indices)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Counts one batch as it is and, if so set, by its test-time views."""
        self.validation_step(batch, batch_idx)
        if self.hparams["tta"] != "none":
            self.views.update(view_logits(self.net, batch.images.type(self.dtype), self.hparams["tta"]), batch.labels)

    def on_validation_epoch_end(self) -> None:
        """Makes the score's figures known under `val/accuracy`, `val/loss` and so on, or `test/…` in a test."""
        self.score = self.evaluation.compute()
        self.predictions = self._collector.predictions() if self._collector.update_called else None
        stage = "test" if self.trainer.testing else "val"
        if self.views.loss.update_called:
            self.views_score = self.views.compute()
        scalars = self.score.scalars(stage)
        diverged = self.trainer.state.fn == "fit" and not math.isfinite(self.score.loss)  # however accurate, it is not the best
        watched = {**scalars, "val/accuracy": math.nan, self.monitored[0]: math.nan} if diverged else scalars
        self.log_dict(watched, logger=False)  # for checkpoints and early stopping, which look it up by name
        self.progress[stage] = self.score.accuracy
        if not self.trainer.sanity_checking:
            self._write_values(scalars)

    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Probabilities (B, classes) with the rows of the images they belong to; padding is left out."""
        counted = batch.labels >= 0
        probabilities = self(batch.images).float().softmax(1)
        return {"indices": batch.indices[counted], "labels": batch.labels[counted], "probabilities": probabilities[counted]}

    # ---- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what an exact resume needs beyond Lightning's states; raises NotFiniteLoss where that is not finite."""
        if self.running.batches and self._row_is_due:  # callbacks save before it is logged, and it must not wait for another step
            self._log_row()
        check_finite(self, checkpoint)
        checkpoint["cifar_lit"] = {
            "device_sums": self._device_sums().tolist(),
            "epoch_sums": list(self.running.epoch),
            "logged_step": self.logged_step,
            "score": {**self.score._asdict(), "confusion": torch.tensor(self.score.confusion)} if self.score else None,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores that, with this model's rates and decays; raises UsageError when the checkpoint is of another net."""
        if self._trainer is None or self.trainer.state.fn != "fit":  # loaded for use, or for a test
            return
        saved = checkpoint.get("hyper_parameters", {})
        for name in ("net", "width", "net_options", "input_shape", "num_classes"):
            if (saved.get(name, self.hparams[name]) or None) != (self.hparams[name] or None):
                line = f"this run's {name} is {saved[name]}, not {self.hparams[name]}"
                raise UsageError(f"{line}: leave the settings of net and images as they were, or start a new run")
        if saved and _schedule_kind(saved) != _schedule_kind(self.hparams):
            names = "model.schedule, schedule_every, warmup_epochs, frozen and input_lr"
            raise UsageError(f"the schedule or its groups of layers would change in mid-training: leave {names} as they were")
        override_optimizer_settings(checkpoint, self.hparams, self.net)
        if state := checkpoint.get("cifar_lit"):
            rows, rank = state["device_sums"], self.trainer.global_rank
            if len(rows) != self.trainer.world_size:  # those of all devices go on in the first one
                rows = [[sum(column) for column in zip(*rows, strict=True)]]
            if rank < len(rows):
                self.running = RunningMetrics(self.device, *rows[rank])
            loss, hits, images = map(float, state["epoch_sums"])
            self.running.epoch = [loss, hits, images]
            self.running.batches = int(any(images for *_, images in rows))  # the same on all devices
            self.logged_step = int(state["logged_step"])
            self.score = Score.from_dict(state["score"], self.hparams["num_classes"])
