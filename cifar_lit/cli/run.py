"""One run of a training command: folder, loggers and callbacks around the Trainer, and what is written at its end."""

from __future__ import annotations

import json
import math
import platform
import shlex
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor
from torchvision.utils import make_grid

from cifar_lit.cli import console
from cifar_lit.data.datamodule import ImageData
from cifar_lit.errors import Failure
from cifar_lit.files import write_text
from cifar_lit.inference.load import load
from cifar_lit.inference.novelty import learn_novelty
from cifar_lit.runs.loggers import CurveFile, TensorBoardCurves
from cifar_lit.runs.model_file import ModelCard, save_weights
from cifar_lit.runs.predictions import fingerprint, write_predictions
from cifar_lit.runs.run_folder import PREVIOUS, RunFolder, display_path
from cifar_lit.training.callbacks import (
    Clock,
    DisableLightningSignals,
    Divergence,
    EpochLines,
    LiveBar,
    OrderlyStop,
    RandomState,
    RegularCheckpoint,
    parse_interval,
)
from cifar_lit.training.checkpoint import best_checkpoint, last_checkpoint, read_checkpoint
from cifar_lit.training.classifier import ImageClassifier
from cifar_lit.training.metrics import Score

# What TensorBoard's hparams tab shows of a run: the settings that people compare runs by.
COMPARED = (
    "recipe", "dataset", "net", "width", "optimizer", "lr", "momentum", "weight_decay", "schedule", "warmup_epochs",
    "label_smoothing", "ema_decay", "batch_size", "max_epochs", "precision", "crop", "flip", "cutout", "seed",
)  # fmt: skip


class Run:
    """What one command keeps track of besides the Trainer.

    folder: where everything goes. settings: the parsed configuration as nested plain values. config: its text for
    config.yaml. notes: lines for the start card, by name. command: fit, validate, test or predict.
    """

    def __init__(self, folder: RunFolder, settings: dict[str, Any], config: str, notes: dict[str, str], command: str) -> None:
        self.folder, self.settings, self.config, self.notes = folder, settings, config, notes
        self.clock = Clock()
        self.best, self.last = best_checkpoint(), last_checkpoint()
        self.command, self.trains = command, command == "fit"
        self._board: TensorBoardCurves | None = None

    def callbacks(self, validates: bool, bar: bool) -> list[Callback]:
        """All callbacks of a training; checkpoints by validation only where there is one."""
        chosen: list[Callback] = [DisableLightningSignals(), _Folder(self)]
        if bar:
            chosen.append(LiveBar())
        if self.trains:
            chosen += [self.clock, EpochLines(self.clock), RandomState(), Divergence()]
            chosen += [self.best, self.last] if validates else [self.last]
            if every := self.settings.get("checkpoint_every"):
                chosen.append(RegularCheckpoint(parse_interval(every), self.last))
            chosen.append(OrderlyStop(self.last))
        return chosen

    def loggers(self, resumed_step: int | None) -> list[Logger]:
        """Curves as a table and for TensorBoard; for a test alone its figures, and nothing for what draws none."""
        if not self.trains:
            self._board = TensorBoardCurves(self.folder, None) if self.command == "test" else None
            return [self._board] if self._board else []
        found = {**self.settings.get("trainer", {}), **self.settings.get("model", {}), **self.settings.get("data", {})}
        found |= {"recipe": self.settings.get("recipe"), "seed": self.settings.get("seed_everything")}
        display_path = {name: found[name] for name in COMPARED if found.get(name) is not None}
        self._board = TensorBoardCurves(self.folder, display_path, resumed_step)
        return [self._board, CurveFile(self.folder, resumed_step)]

    def take_best_weights(self, model: ImageClassifier) -> Score | None:
        """Loads the weights that are to be tested; returns the validation score they had."""
        path = self.best.best_model_path or f"{self.last.dirpath}/last.ckpt"
        checkpoint = read_checkpoint(Path(path))
        model.load_state_dict(checkpoint["state_dict"])
        score = checkpoint["cifar_lit"]["score"]
        return Score(**score) if score and self.best.best_model_path else None

    def metrics(self, trainer: pl.Trainer, model: ImageClassifier, data: ImageData, val: Score | None, test: Score | None) -> Any:
        """The contents of metrics.json."""
        seconds, training = self.clock.seconds, self.clock.training_seconds
        return {
            "recipe": self.settings.get("recipe"),
            "net": model.hparams["net"],
            "dataset": data.dataset,
            "seed": self.settings.get("seed_everything"),
            "epochs": trainer.current_epoch if self.trains else None,
            "accelerator": {"cuda": "gpu"}.get(trainer.strategy.root_device.type, trainer.strategy.root_device.type),
            "devices": trainer.world_size,
            "precision": str(trainer.precision),
            "batch_size": data.batch_size,
            "parameters": model.parameter_count,
            "train_seconds": round(seconds, 3) if self.trains else None,
            "images_per_second": round(self.clock.images / training, 1) if self.trains and training else None,
            "val": {"accuracy": val.accuracy, "loss": val.loss} if val else None,
            "test": _test_entry(test, data, model) if test else None,
            "versions": versions(),
        }

    def write(
        self, metrics: dict[str, Any], model: ImageClassifier | None, data: ImageData, outcomes: dict[str, Tensor] | None
    ) -> None:
        """Writes metrics.json, and before it model.safetensors if there is a model to keep and the outcomes of a test."""
        if model is not None:
            h = model.hparams
            mean, std = data.statistics
            card = ModelCard(h["net"], h["width"], h["input_shape"], list(data.classes), mean, std, dict(h["net_options"] or {}))
            weights, path = model.net.state_dict(), self.folder.path / "model.safetensors"
            save_weights(path, weights, card)
            look = load(path, str(data.device)).look  # with the net as it will be used, whatever precision it was trained in
            if learned := learn_novelty(look, data.train_images.images, *data.split):
                save_weights(path, weights, replace(card, novelty=learned[1]), learned[0])
            (self.folder.path / PREVIOUS).unlink(missing_ok=True)  # there is nothing left to go on with
        if outcomes is not None:
            write_predictions(self.folder.path / "predictions.csv", data.classes, [outcomes])
        write_text(self.folder.path / "metrics.json", json.dumps(_without_nan(metrics), indent=2, ensure_ascii=False) + "\n")

    def show(
        self,
        metrics: dict[str, Any],
        val: Score | None,
        test: Score | None,
        outcomes: dict[str, Tensor] | None,
        data: ImageData,
        step: int,
    ) -> None:
        """Draws what was scored for TensorBoard, and writes the page about a training that was tested.

        outcomes: of each image of the test or, without one, of the validation. step: where it stands on TensorBoard's axis.
        """
        from cifar_lit.cli import ending  # here, as all that draws takes its time to import

        for part, score in (("val", val), ("test", test)):
            if self._board and score and score.images:
                found = outcomes if part == "test" or test is None else None
                ending.draw(self._board, part, score, found, data, step)
        if self.trains and test and outcomes is not None:
            ending.write_page(self.folder.path, metrics, outcomes, data)

    def resume_command(self, script: str, command: str) -> str | None:
        """What to type to go on with this run, None when it has no checkpoint yet."""
        if not self.trains or not self.folder.resumable:
            return None
        return f"{program(script, command)} --resume {shlex.quote(display_path(self.folder.path))}"

    def print_end(self, metrics: dict[str, Any], test: Score | None, data: ImageData) -> None:
        """Prints the results and the next commands."""
        if test:
            console.accuracy_table(data.classes, test.per_class, [sum(row) for row in test.confusion])
            if views := metrics["test"].get("tta"):
                console.say(f"with {views['views']} test-time views accuracy {views['accuracy']:.4f} · loss {views['loss']:.4f}")
            console.say(f"test accuracy {test.accuracy:.4f} · loss {test.loss:.4f} · {test.images} images")
        elif metrics["val"]:
            console.say(f"validation accuracy {metrics['val']['accuracy']:.4f} · loss {metrics['val']['loss']:.4f}")
        if self.trains:
            console.say(f"trained in {metrics['train_seconds']:.1f} s · {metrics['images_per_second'] or 0:.0f} images/s")
        run = display_path(self.folder.path)
        console.say(f"run {run}")
        if self.trains:
            console.say("", "next:", f"  tensorboard --logdir {shlex.quote(display_path(self.folder.path.parent))}")
            if test is None:
                checkpoint = f"{run}/checkpoints/{'best' if self.best.best_model_path else 'last'}.ckpt"
                console.say(f"  cifar-lit test --ckpt_path {shlex.quote(checkpoint)}")
            console.say(f"  cifar-lit report {shlex.quote(run)} --open", f"  cifar-lit classify {shlex.quote(run)} PICTURES")
            console.say(f"  python -c \"import cifar_lit; print(cifar_lit.load('{run}'))\"")


class _Folder(Callback):
    """Claims the run folder on the first device, points checkpoints into it, and introduces the run."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Before anything is written."""
        run = self._run
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        own = [*Path(run.notes.get("resume", "")).parts[-3:], run.notes.get("step", "")]
        path, first = trainer.strategy.broadcast((str(run.folder.path) if trainer.is_global_zero else "", own))
        if own != first:  # on a file system whose nodes see changes late, or not at all
            raise Failure(
                f"process {trainer.global_rank} would start from {_place(own)}, the first one from {_place(first)}: "
                "--logs must be a folder that all processes see alike"
            )
        run.folder.follow(Path(path))
        for checkpoint in trainer.checkpoint_callbacks:
            if getattr(checkpoint, "dirpath", "") is None:
                checkpoint.dirpath = f"{path}/checkpoints"  # type: ignore[attr-defined]
        if trainer.is_global_zero:
            if run.trains:  # a run that is killed before its first checkpoint is still seen to be a training
                (run.folder.path / "checkpoints").mkdir(exist_ok=True)
            write_text(run.folder.path / "config.yaml", run.config)  # of a resumed run too: flags may have changed it

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prints the start card, and shows TensorBoard what the net is about to see."""
        if not trainer.is_global_zero:
            return
        data = trainer.datamodule  # type: ignore[attr-defined]
        console.start_card(self._card(trainer, pl_module, data), "cifar-lit")
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardCurves) and not self._run.folder.resumed:
                logger.log_images("images/train", make_grid(data.sample(64), nrow=8))

    def _card(self, trainer: pl.Trainer, model: Any, data: ImageData) -> list[tuple[str, str]]:
        train, val = (len(part) for part in data.split)
        channels, height, width = data.input_shape
        world = trainer.world_size
        share = data.batch_size // world
        exact = "=" if share * world == data.batch_size else "≈"
        device = trainer.strategy.root_device.type
        h = model.hparams
        notes = self._run.notes
        size = f"{channels}×{height}×{width}"
        _, where = data.placed("train")
        kept = f"in the memory of {device}" if where == "device" else f"read by {data.workers} workers"
        schedule = "".join(f"{side} px for {shared:.0%}, " for side, shared in data.resolutions.items())
        rows = [
            ("data", f"{data.dataset} · train {train:,} · validation {val:,} · {data.class_count} classes · {size} · {kept}"),
            ("net", f"{h['net']} · {model.parameter_count:,} parameters"),
            ("devices", f"{world} × {device}"),
            ("precision", str(trainer.precision) + (f" ({notes['precision']})" if "precision" in notes else "")),
            ("batch", f"{data.batch_size} {exact} {world} × {share} · {model.batches_per_epoch():,} steps an epoch"),
            (
                "optimizer",
                f"{h['optimizer']} · lr {h['lr']:g} · {h['schedule']} · {trainer.max_epochs} epochs · seed {data.seed}",
            ),
        ]
        if schedule:
            rows.insert(1, ("sizes", f"{schedule}then {height} px"))
        if "resume" in notes:
            rows.append(("resumes", f"{notes['resume']} at epoch {trainer.current_epoch + 1}, step {trainer.global_step}"))
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            rows.append(("run", display_path(self._run.folder.path)))
        return rows


def _place(found: list[str]) -> str:
    return f"{'/'.join(found[:-1])} of step {found[-1]}" if found[-1] else "the beginning"


def program(script: str, command: str) -> str:
    """How this program was started, as one would type it again: by its script, console script or module."""
    path = Path(script)
    if path.name == "__main__.py":
        return f"python -m cifar_lit {command}"
    if path.suffix == ".py":
        return f"python {script}"
    return f"{path.name} {command}"


def versions() -> dict[str, str]:
    """Versions of what the result depends on."""
    found = {"python": platform.python_version()}
    for package in ("torch", "torchvision", "lightning", "torchmetrics", "cifar-lit"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a checkout that is not installed
            found[package] = "unknown"
    return found


def _test_entry(score: Score, data: ImageData, model: ImageClassifier) -> dict[str, Any]:
    per_class = {
        name: round(accuracy, 6) if accuracy == accuracy else None
        for name, accuracy in zip(data.classes, score.per_class, strict=True)
    }
    entry = {"accuracy": score.accuracy, "loss": score.loss, "images": score.images, "per_class": per_class}
    views = model.views_score
    if views:
        entry["tta"] = {"views": model.hparams["tta"], "accuracy": views.accuracy, "loss": views.loss}
    entry["fingerprint"] = fingerprint(data.test_images.images, data.test_images.labels)
    return entry


def _without_nan(value: Any) -> Any:
    """Nested values with null for numbers that JSON does not know: the loss of a net that has diverged."""
    if isinstance(value, dict):
        return {name: _without_nan(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
