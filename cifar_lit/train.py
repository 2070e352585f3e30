"""One training, from its settings to its results: data → model → Trainer → fit → test → results.

`cli/fit.py` reads the settings, and builds data, model and Trainer from them; here is what happens with these.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor
from torchvision.utils import make_grid

from cifar_lit.cli.console import print_results, print_start_card
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.image_set import spread_rows
from cifar_lit.errors import Failure, UsageError
from cifar_lit.files import write_text
from cifar_lit.inference.load import Classifier
from cifar_lit.inference.novelty import learn_novelty, sample_rows
from cifar_lit.models.registry import build_on_meta_device
from cifar_lit.runs.calibration import fit_temperature
from cifar_lit.runs.figures import augmented_sample
from cifar_lit.runs.loggers import CurveFile, TensorBoardCurves
from cifar_lit.runs.model_file import ModelCard, build_loaded_net, check_card, save_weights
from cifar_lit.runs.predictions import write_predictions
from cifar_lit.runs.results import draw_for_tensorboard, logged_settings, metrics_of, write_metrics, write_report
from cifar_lit.runs.run_folder import PREVIOUS, RunFolder, display_path, stamp_start
from cifar_lit.text import counted, say
from cifar_lit.training.callbacks import Clock, DivergenceWarning, EpochLines, LiveBar, RandomState
from cifar_lit.training.checkpoint import best_checkpoint, describe_net, last_checkpoint, read_checkpoint, regular_checkpoint
from cifar_lit.training.classifier import ImageClassifier
from cifar_lit.training.finetune import training_plan
from cifar_lit.training.metrics import Score
from cifar_lit.training.orderly_stop import NoSignalHandlers, OrderlyStop

MAX_DESCRIBED = 10_000  # validation images that the temperature and what is unlike rest on


class Run(Callback):
    """What a training command has besides data, model and Trainer: its folder, callbacks and loggers, and its results.

    As a callback it claims the folder, points checkpoints into it, and introduces the run.

    Args:
        settings: the parsed configuration as nested plain values; config: its text, for config.yaml.
        notes: what the start card says besides, by name.
        command: fit, train (a fit with a test), validate, test or predict.
        monitored: what the best checkpoint is chosen by, as of `best_checkpoint`.
    """

    def __init__(
        self,
        folder: RunFolder,
        settings: dict[str, Any],
        config: str,
        notes: dict[str, str],
        command: str,
        monitored: tuple[str, str] = ("val/accuracy", "max"),
    ) -> None:
        self.folder, self.settings, self.config, self.notes = folder, settings, config, notes
        self.command, self.trains = command, command in ("fit", "train")
        self.clock = Clock()
        self.best, self.last = best_checkpoint(*monitored), last_checkpoint()
        self.board: TensorBoardCurves | None = None

    # ---- what the Trainer is built with

    def callbacks(self, validates: bool, bar: bool) -> list[Callback]:
        """Those of a Trainer: checkpoints by validation only where there is one, a live bar on a terminal."""
        callbacks: list[Callback] = [NoSignalHandlers(), self, *([LiveBar()] if bar else [])]
        if self.trains:
            callbacks += [self.clock, EpochLines(self.clock), RandomState(), DivergenceWarning()]
            callbacks += [self.best, self.last] if validates else [self.last]
            if interval := self.settings.get("checkpoint_every"):
                callbacks.append(regular_checkpoint(interval))
            callbacks.append(OrderlyStop(self.last))
        return callbacks

    def loggers(self, resumed_step: int | None) -> list[Logger]:
        """Curves as a table and for TensorBoard; for a test alone its figures, and nothing for what draws none."""
        if self.trains:
            self.board = TensorBoardCurves(self.folder, logged_settings(self.settings), resumed_step)
            return [self.board, CurveFile(self.folder, resumed_step)]
        self.board = TensorBoardCurves(self.folder, None) if self.command == "test" else None
        return [self.board] if self.board else []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Claims the folder. Raises Failure where processes would start from different checkpoints."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        start = " of step ".join(filter(None, ("/".join(Path(self.notes.get("resume", "")).parts[-3:]), self.notes.get("step"))))
        path, first = trainer.strategy.broadcast((str(self.folder.path) if trainer.is_global_zero else "", start))
        if start != first:  # on a file system whose nodes see changes late, or not at all
            raise Failure(
                f"process {trainer.global_rank} would start from {start or 'the beginning'}, the first one from "
                f"{first or 'the beginning'}: --logs must be a folder that all processes see alike"
            )
        self.folder.follow(Path(path))
        for checkpoint in trainer.checkpoint_callbacks:
            if getattr(checkpoint, "dirpath", "") is None:
                checkpoint.dirpath = f"{path}/checkpoints"  # type: ignore[attr-defined]
        if trainer.is_global_zero:
            if self.trains:  # a run that is killed before its first checkpoint is still seen to be a training
                (self.folder.path / "checkpoints").mkdir(exist_ok=True)
            if not self.folder.resumed:
                self._write_config()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes what flags have changed of a resumed run, once its checkpoint has been taken up with them."""
        if self.folder.resumed and trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._write_config()

    def _write_config(self) -> None:
        write_text(self.folder.path / "config.yaml", self.config)
        stamp_start(self.folder.path)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prints the start card, and shows TensorBoard what the net is about to see."""
        if trainer.is_global_zero:
            data = trainer.datamodule  # type: ignore[attr-defined]
            if pl_module.hparams["weights"] and not self.folder.resumed:
                self.notes["trains"] = training_plan(pl_module, data, max(trainer.max_epochs or 1, 1))
            print_start_card(self, trainer, pl_module, data)
            if self.board in trainer.loggers and not self.folder.resumed:  # none of ours in a fast_dev_run
                self.board.log_images("images/train", make_grid(augmented_sample(data, 64), nrow=8))

    # ---- what it does

    def fit(self, trainer: pl.Trainer, model: ImageClassifier, data: ImageData, checkpoint: str | Path | None) -> None:
        """Trains, takes the best weights, tests them once if the command is `train`, and writes the results."""
        check_card(model_card(model, data))
        data.trainer = trainer  # it tells how many devices there are
        data.train_dataloader()  # refuses what cannot be shared out among them, before there is a run folder
        h, (channels, height, width) = model.hparams, data.input_shape
        for side in data.resolutions:  # the net says what it cannot take
            shape = {"channels": channels, "image_size": (side, round(side * width / height)), "num_classes": data.class_count}
            build_on_meta_device(h["net"], **shape, width=h["width"], options=h["net_options"])
        trainer.fit(model, datamodule=data, ckpt_path=checkpoint)
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            _report_dev_run(trainer, training=trainer.num_training_batches, validation=sum(trainer.num_val_batches))
            return
        best = load_weights(model, self.best.best_model_path or f"{self.last.dirpath}/last.ckpt")
        val = Score.from_dict(best.get("cifar_lit", {}).get("score"), data.class_count) if self.best.best_model_path else None
        test = self._evaluate("test", trainer, model, data) if self.command == "train" else None
        if val and not test:
            trainer.loggers = []  # which have this score already; what is wanted is each image's prediction
            self._evaluate("validate", trainer, model, data)
        self._finish(model, data, val, test)

    def evaluate(self, trainer: pl.Trainer, model: ImageClassifier, data: ImageData, checkpoint: str | Path) -> None:
        """Scores a checkpoint on the validation or the test images, or writes its predictions for the test images."""
        if self.command == "validate" and not len(data.split[1]):
            raise UsageError("there is nothing to validate on: data.val_size is 0")
        load_weights(model, checkpoint)
        if self.command == "predict":
            batches: Any = trainer.predict(model, datamodule=data, return_predictions=True)
            if trainer.fast_dev_run:  # type: ignore[attr-defined]
                _report_dev_run(trainer, prediction=sum(trainer.num_predict_batches))
                return
            count = write_predictions(self.folder.path / "predictions.csv", data.classes, batches, data.test_images.names)
            say(f"{counted(count, 'prediction')} in {display_path(self.folder.path)}/predictions.csv")
            return
        score = self._evaluate(self.command, trainer, model, data)
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            validates = self.command == "validate"
            stage, batches = ("validation", trainer.num_val_batches) if validates else ("test", trainer.num_test_batches)
            _report_dev_run(trainer, **{stage: sum(batches)})
            return
        self._finish(model, data, *((score, None) if self.command == "validate" else (None, score)))

    def _evaluate(self, stage: str, trainer: pl.Trainer, model: ImageClassifier, data: ImageData) -> Score | None:
        model.score = model.predictions = None
        getattr(trainer, stage)(model, datamodule=data, verbose=False)
        return model.score

    # ---- what it leaves

    def _finish(self, model: ImageClassifier, data: ImageData, val: Score | None, test: Score | None) -> None:
        trainer, folder = model.trainer, self.folder.path
        if not trainer.is_global_zero:
            return
        card, tensors = describe_model(model, data) if self.trains else (model_card(model, data), {})
        clock = self.clock if self.trains else None
        metrics = metrics_of(self.settings, trainer, model, data, clock, val, test, card.temperature)
        if self.board:
            draw_for_tensorboard(self.board, val, test, model.predictions, data, trainer.global_step)
        if self.trains:
            save_weights(folder / "model.safetensors", model.net.state_dict(), card, tensors)
            with suppress(OSError):  # there is nothing left to go on with; what cannot be removed does no harm
                (folder / PREVIOUS).unlink()
        if test and model.predictions is not None:
            write_predictions(folder / "predictions.csv", data.classes, [model.predictions], data.test_images.names)
            if self.trains:
                write_report(folder, metrics, model.predictions, data)
        write_metrics(folder, metrics)
        print_results(self, metrics, test, data)


def _report_dev_run(trainer: pl.Trainer, **batches: float) -> None:
    """Print the number of batches by stage that `fast_dev_run` has run."""
    if trainer.is_global_zero:
        parts = [f"{count} {stage} batch{'es' * (count != 1)}" for stage, count in batches.items() if count]
        say(f"fast_dev_run: {' and '.join(parts)} without a failure; nothing was saved")


def model_card(model: ImageClassifier, data: ImageData) -> ModelCard:
    """What model.safetensors will say of the net."""
    h, (mean, std) = model.hparams, data.statistics
    options, resize = dict(h["net_options"] or {}), data.settings.resize
    return ModelCard(h["net"], h["width"], h["input_shape"], list(data.classes), mean, std, options, resize=resize)


def describe_model(model: ImageClassifier, data: ImageData) -> tuple[ModelCard, dict[str, Tensor]]:
    """The card of a trained net, with its temperature, and what tells images unlike those of the training.

    Both rest on the validation images, as the net was not trained on them. Without any there is no temperature, and no image is
    called unlike.
    """
    card, (train, val) = model_card(model, data), data.split
    val = spread_rows(val, MAX_DESCRIBED)
    images = data.train_images
    # the net as it will be used, in float32
    classifier = Classifier(build_loaded_net(card, model.net.state_dict()), str(data.device))
    logits, embeddings = classifier.look_at(images.take, val)
    card = replace(card, temperature=fit_temperature(logits, images.labels[val]))
    learned = learn_novelty(classifier.look_at(images.take, sample_rows(train))[1], embeddings, logits)
    return (replace(card, novelty=learned[1]), learned[0]) if learned else (card, {})


def load_weights(model: ImageClassifier, path: str | Path) -> dict[str, Any]:
    """Takes the weights of a checkpoint, which it returns; raises Failure where they are another net's."""
    checkpoint = read_checkpoint(Path(path).expanduser())
    try:
        model.load_state_dict(checkpoint["state_dict"])
    except RuntimeError:
        raise Failure(
            f"{path} holds weights of {describe_net(checkpoint.get('hyper_parameters', {}))}, "
            f"not of {describe_net(model.hparams)}: leave --net and the data flags out, or give those of the checkpoint"
        ) from None
    return checkpoint
