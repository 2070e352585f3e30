"""Print the card at the start of a run and the results at its end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from rich.table import Column, Table

from cifar_lit.base.files import display_path
from cifar_lit.base.text import counted, listed, quoted, rate_text, say
from cifar_lit.base.trust import untrusted_parts
from cifar_lit.cli.console import for_tables, say_wrapped, unbroken
from cifar_lit.data.datamodule import ImageData
from cifar_lit.run.loggers import feature_settings
from cifar_lit.run.record import Metrics, group_lines, read_metrics, score_title, scores_of, shown_scores, weights_text
from cifar_lit.run.run import Run
from cifar_lit.train import Results
from cifar_lit.training.loop import steps_per_epoch
from cifar_lit.training.score import Score


class StartCard(Callback):
    """Print the settings at the start of a training."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the card."""
        if not trainer.is_global_zero:
            return
        rows = start_rows(self._run, trainer, pl_module, trainer.datamodule)  # type: ignore[attr-defined]
        for name, value in rows.items():
            say_wrapped(f"{name:<12} {value}", indent=13)


def start_rows(run: Run, trainer: pl.Trainer, model: pl.LightningModule, data: ImageData) -> dict[str, str]:
    """Return the rows of the start card by name."""
    device = trainer.strategy.root_device.type
    parameters = sum(parameter.numel() for parameter in model.net.parameters())  # type: ignore[union-attr,misc]
    settings = model.hparams
    rows = {
        "data": _data_text(data, device),
        "net": f"{settings['net']} · {parameters:,} parameters",
        "devices": f"{trainer.world_size} × {device}",
    }
    if device == "cpu" and "threads" in run.notes:
        rows["threads"] = run.notes["threads"]
    rows["precision"] = str(trainer.precision).replace("32-true", "float32")
    if "precision" in run.notes:
        rows["precision"] += f" ({run.notes['precision']})"
    rows |= _step_rows(trainer, settings, data)
    if "resume" in run.notes:
        position = f"epoch {trainer.current_epoch + 1}, step {trainer.global_step}"
        rows["resumes"] = f"{run.notes['resume']} at {position}"
    rows["features"] = " · ".join(f"{name} {value}" for name, value in feature_settings(run.settings).items())
    if not trainer.fast_dev_run:  # type: ignore[attr-defined]
        rows["run"] = unbroken(display_path(run.folder.path))
    return {name: value for name, value in rows.items() if value}


def _data_text(data: ImageData, device: str) -> str:
    train, val = data.split
    channels, height, width = data.input_shape
    names = ""
    if data.dataset == "folder":
        names = f" ({listed(data.classes)})"
    source = f"read by {counted(data.loading.workers, 'worker')}"
    if data.placed("train").place == "device":
        source = "in CPU memory" if device == "cpu" else "in GPU memory"
    counts = f"train {len(train):,} · validation {len(val):,} · {data.class_count} classes{names}"
    return f"{data.dataset} · {counts} · {channels}×{height}×{width} · {source}"


def _step_rows(trainer: pl.Trainer, settings: Mapping[str, object], data: ImageData) -> dict[str, str]:
    batch = counted(data.batch_size, "image")
    if trainer.world_size > 1:
        share = data.batch_size // trainer.world_size
        relation = "=" if share * trainer.world_size == data.batch_size else "≈"
        batch = f"{data.batch_size} {relation} {trainer.world_size} × {share}"
    steps = counted(steps_per_epoch(trainer), "step")
    epochs = counted(data.epochs, "epoch") if data.epochs else "unlimited epochs"
    optimizer = f"{settings['optimizer']} · lr {settings['lr']:g} · {settings['schedule']}"
    return {
        "batch": f"{batch} · {steps} per epoch",
        "optimizer": f"{optimizer} · {epochs} · seed {data.seed}",
    }


def accuracy_table(score: Score, data: ImageData) -> Table:
    """Return a table of the accuracy of each class, or of the 20 worst of more than 30 classes.

    With several labels, it has their average precision.
    """
    measure = "average precision" if data.has_several_labels else "accuracy"
    counts = data.test_images.class_counts(torch.arange(len(data.test_images))).tolist()
    columns = "class", Column(measure, justify="right"), Column("images", justify="right")
    table = Table(*columns, title=f"test {measure} per class", title_justify="left", title_style="")
    rows = list(zip(data.classes, score.per_class, counts, strict=True))
    if len(rows) > 30:
        rows = sorted((row for row in rows if row[2]), key=lambda row: row[1])[:20]
        table.title = f"test {measure} of the 20 worst classes"
    for name, share, count in rows:
        table.add_row(name, f"{share:.4f}" if count else "no image", str(count))
    return table


def score_lines(scores: Metrics, data: ImageData) -> list[str]:
    """Return lines with the values besides accuracy and loss. scores: the `test` or `val` part of metrics.json."""
    values = []
    for name, value in shown_scores(scores, data.class_count).items():
        if name not in ("accuracy", "loss"):
            values.append(f"{score_title(name)} {value:.4f}")
    lines = []
    if values:
        lines.append(" · ".join(values))
    if scores["interval"]:
        lines.append("95 % interval of the accuracy {:.4f} … {:.4f}".format(*scores["interval"]))
    return lines


def new_class_lines(metrics: Metrics, weights: str) -> list[str]:
    """Return a line about the classes of the run whose weights a training began with, if it has further classes.

    weights: the setting `finetune.weights`. The test images of that run may be others.
    """
    before = scores_of(read_metrics(Path(weights).expanduser())).get("per_class", {})
    old = []
    new = []
    for name, accuracy in metrics["test"]["per_class"].items():
        if name in before:
            old.append(f"{name} {before[name]} → {accuracy}")
        else:
            new.append(f"{name} {accuracy}")
    if not old or not new:
        return []
    return [f"accuracy of the classes of {weights}: {listed(old)}; of new ones: {listed(new)}"]


def print_result(result: Results | int | None, run: Run, data: ImageData) -> None:
    """Print the results, the number of predictions, or that a `fast_dev_run` has ended."""
    if isinstance(result, Results):
        _print_results(run, result, data)
    elif result:
        say(f"{counted(result, 'prediction')} in {display_path(run.folder.path)}/predictions.csv")
    else:
        say("fast_dev_run: all batches without a failure; nothing was saved")


def _print_results(run: Run, results: Results, data: ImageData) -> None:
    """Print the results and the next commands."""
    metrics, val = results.metrics, results.metrics["val"]
    say(f"weights: {weights_text(metrics)}")
    if results.test:
        _print_test(results.test.score, metrics["test"], data)
        say(*new_class_lines(metrics, (run.settings.get("finetune") or {}).get("weights", "imagenet")))
    elif val:
        say(*score_lines(val, data), f"validation accuracy {val['accuracy']:.4f} · loss {val['loss']:.4f}")
    if run.trains:
        speed = metrics["images_per_second"]
        say(f"trained in {metrics['train_seconds']:.1f} s" + (f" · {rate_text(speed)}" if speed else ""))
    say(f"run {display_path(run.folder.path)}")
    if run.trains:
        _print_next(run, data)


def _print_test(test: Score, scores: Metrics, data: ImageData) -> None:
    for_tables().print(accuracy_table(test, data))
    say(*group_lines(scores))
    if "tta" in scores:
        views = scores["tta"]
        augmented = f"with {views['views']} test-time augmentation"
        say(f"{augmented}: accuracy {views['accuracy']:.4f} · loss {views['loss']:.4f}")
    noun = "image" if test.images == 1 else "images"
    score = f"test accuracy {test.accuracy:.4f} · loss {test.loss:.4f}"
    say(*score_lines(scores, data), f"{score} · {test.images} {noun}")  # plain digits: scripts read this line


def _print_next(run: Run, data: ImageData) -> None:
    """Print the two commands that most users need next."""
    folder, trust = quoted(display_path(run.folder.path)), ""
    if untrusted_parts(run.settings, run.folder.path.parent):
        trust = " --trust"
    first = f"cifar-lit report {folder} --open{trust}"
    if run.command == "fit":
        first = f"cifar-lit test --ckpt_path {folder}/checkpoints/{run.folder.tested['checkpoint']}{trust}"
    say(f"next: {first}", f"      cifar-lit classify {folder} IMAGES{trust}")
