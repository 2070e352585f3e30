"""Print the card at the start of a run and the results at its end."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from rich.panel import Panel
from rich.table import Column, Table

from cifar_lit.cli.console import for_tables
from cifar_lit.data.datamodule import ImageData
from cifar_lit.hooks import methods
from cifar_lit.plugins import is_import_path
from cifar_lit.runs.run import Run
from cifar_lit.runs.run_folder import display_path
from cifar_lit.stats import newcombe_margin
from cifar_lit.text import counted, say
from cifar_lit.train import Results
from cifar_lit.training.metrics import Score

if TYPE_CHECKING:
    from cifar_lit.training.classifier import ImageClassifier

MAX_CLASS_NAMES = 60  # characters of all class names in the start card; longer lists are left out


class StartCard(Callback):
    """Print the settings at the start of a training, as a box on a terminal and as plain lines elsewhere."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def on_train_start(self, trainer: pl.Trainer, pl_module: ImageClassifier) -> None:
        """Print the card."""
        if not trainer.is_global_zero:
            return
        rows = start_rows(self._run, trainer, pl_module, trainer.datamodule)  # type: ignore[attr-defined]
        if not sys.stdout.isatty():
            say(*(f"{name:<12} {value}" for name, value in rows.items()))
            return
        grid = Table.grid(Column(style="dim"), Column(), padding=(0, 2))
        for row in rows.items():
            grid.add_row(*row)
        for_tables().print(Panel(grid, title="cifar-lit", title_align="left", expand=False))


def start_rows(run: Run, trainer: pl.Trainer, model: ImageClassifier, data: ImageData) -> dict[str, str]:
    """Return the rows of the start card by name."""
    train, val = (len(part) for part in data.split)
    channels, height, width = data.input_shape
    device = trainer.strategy.root_device.type
    in_memory = data.placed("train")[1] == "device"
    memory = f"in {'CPU' if device == 'cpu' else 'GPU'} memory"
    source = memory if in_memory else f"read by {counted(data.workers, 'worker')}"
    listed = f" ({', '.join(data.classes)})" if data.dataset == "folder" else ""
    names = listed if len(listed) <= MAX_CLASS_NAMES else ""
    classes = f"{data.class_count} classes{names} · {channels}×{height}×{width}"
    h, notes = model.hparams, run.notes
    parameters = sum(parameter.numel() for parameter in model.net.parameters())
    precision = "float32" if trainer.precision == "32-true" else str(trainer.precision)
    rows = {
        "data": f"{data.dataset} · train {train:,} · validation {val:,} · {classes} · {source}",
        "net": f"{h['net']} · {parameters:,} parameters",
        "devices": f"{trainer.world_size} × {device}",
        "threads": notes.get("threads", "") if device == "cpu" else "",
        "precision": precision + (f" ({notes['precision']})" if "precision" in notes else ""),
        **_step_rows(trainer, h, data),
        "resumes": f"{notes.get('resume')} at epoch {trainer.current_epoch + 1}, step {trainer.global_step}"
        if "resume" in notes
        else "",
        "run": "" if trainer.fast_dev_run else display_path(run.folder.path),  # type: ignore[attr-defined]
    }
    for card in methods(trainer, "card"):
        rows |= card()
    rows["run"] = rows.pop("run")  # the last line
    return {name: value for name, value in rows.items() if value}


def _step_rows(trainer: pl.Trainer, h: Mapping[str, Any], data: ImageData) -> dict[str, str]:
    """Return the start card's rows about batches and the optimizer."""
    share = data.batch_size // trainer.world_size
    relation = "=" if share * trainer.world_size == data.batch_size else "≈"
    steps = -(-int(trainer.num_training_batches) // trainer.accumulate_grad_batches)
    epochs = counted(data.epochs, "epoch") if data.epochs else "unlimited epochs"
    return {
        "batch": f"{data.batch_size} {relation} {trainer.world_size} × {share} · {counted(steps, 'step')} per epoch",
        "optimizer": f"{h['optimizer']} · lr {h['lr']:g} · {h['schedule']} · {epochs} · seed {data.seed}",
    }


def accuracy_table(score: Score, data: ImageData) -> Table:
    """Return a table of the accuracy of each class, or of the ten best and ten worst of more than 30 classes."""
    columns = (Column(name, justify="right") for name in ("accuracy", "images"))
    table = Table("class", *columns, title="test accuracy per class", title_justify="left", title_style="")
    classes = list(zip(data.classes, score.per_class, map(sum, score.confusion), strict=True))
    if len(classes) > 30:
        classes = sorted((row for row in classes if row[2]), key=lambda row: -row[1])
    rows = [(name, f"{accuracy:.4f}" if count else "no image", str(count)) for name, accuracy, count in classes]
    for row in rows if len(rows) <= 30 else [*rows[:10], ("…", "", ""), *rows[-10:]]:
        table.add_row(*row)
    return table


# Values of metrics.json besides accuracy and loss, and their names on the console.
FIGURES = {"balanced_accuracy": "balanced accuracy", "macro_f1": "macro F1", "top5": "top-5 accuracy"}
MAX_HALF_WIDTH = 0.02  # accuracy; a test set with a wider interval is called small


def score_lines(scores: Mapping[str, Any]) -> list[str]:
    """Return lines with the values besides accuracy and loss. scores: the `test` or `val` part of metrics.json.

    Balanced accuracy is left out if it equals the accuracy, as it does for classes of equal size.
    """
    values = {text: f"{scores[name]:.4f}" for name, text in FIGURES.items() if name in scores}
    if values.get("balanced accuracy") == f"{scores['accuracy']:.4f}":
        del values["balanced accuracy"]
    lines = [" · ".join(f"{text} {value}" for text, value in values.items())]
    if scores["interval"]:
        lines.append("95 % interval of the accuracy {:.4f} … {:.4f}".format(*scores["interval"]))
    return lines


def small_set_text(scores: Mapping[str, Any]) -> str | None:
    """Return a warning about differences that a small test set cannot show, None for a larger set.

    The warning holds for runs tested on different images. On the same images, `compare` shows smaller differences.

    Args:
        scores: the `test` part of metrics.json.
    """
    low, high = scores["interval"] or (0.0, 0.0)
    if (high - low) / 2 <= MAX_HALF_WIDTH:
        return None
    chance = newcombe_margin(scores["accuracy"], (low, high))
    return f"small test set: differences between runs below {chance:.3f} may be chance; --folds 5 tests on every image"


def print_results(run: Run, results: Results, data: ImageData) -> None:
    """Print the results and the next commands."""
    metrics, test = results.metrics, results.test
    if test:
        scores = metrics["test"]
        for_tables().print(accuracy_table(test, data))
        if data.dataset != "shapes" and not data.parts.folds and (warning := small_set_text(scores)):
            say(warning)
        if views := scores.get("tta"):
            tta = f"with {views['views']} test-time augmentation"
            say(f"{tta}: accuracy {views['accuracy']:.4f} · loss {views['loss']:.4f}")
        say(*(f"test {name} {value:.4f}" for name, value in test.further.items()), *score_lines(scores))
        images = f"{test.images} image{'s' * (test.images != 1)}"  # plain digits: scripts read this line
        say(f"test accuracy {test.accuracy:.4f} · loss {test.loss:.4f} · {images}")
    elif val := metrics["val"]:
        further = {name: value for name, value in val.items() if name not in ("accuracy", "loss", "interval", *FIGURES)}
        say(*(f"validation {name} {value:.4f}" for name, value in further.items()), *score_lines(val))
        say(f"validation accuracy {val['accuracy']:.4f} · loss {val['loss']:.4f}")
    if run.trains:
        speed = f" · {metrics['images_per_second']:.0f} images/s" if metrics["images_per_second"] else ""
        say(f"trained in {metrics['train_seconds']:.1f} s{speed}")
    folder = display_path(run.folder.path)
    say(f"run {folder}")
    if run.trains:
        board = f"  tensorboard --logdir {shlex.quote(display_path(run.folder.path.parent))}"
        say("", "next:", *([board] if "tensorboard" in run.settings["logger"] else []))
        if test is None:
            checkpoint = f"{folder}/checkpoints/{'best' if run.best.best_model_path else 'last'}.ckpt"
            say(f"  cifar-lit test --ckpt_path {shlex.quote(checkpoint)}")
        say(f"  cifar-lit report {shlex.quote(folder)} --open", f"  cifar-lit classify {shlex.quote(folder)} IMAGES")
        if data.dataset == "folder":  # a net memorises wrong labels that it was trained on
            config = shlex.quote(f"{folder}/config.yaml")
            say(f"  cifar-lit train --config {config} --folds 5   (then `cifar-lit review` shows wrong labels)")
        trust = ", trust=True" if is_import_path(run.settings["model"]["net"]) else ""
        code = f"import cifar_lit; print(cifar_lit.load({folder!r}{trust}))"
        is_plain = shlex.quote(folder) == folder  # a shell would expand other names between double quotes
        say("  python -c " + (f'"{code}"' if is_plain else shlex.quote(code)))


def print_dev_run(trainer: pl.Trainer) -> None:
    """Print the number of batches by stage that `fast_dev_run` has run."""
    stages = {
        "training": trainer.num_training_batches if trainer.state.fn == "fit" else 0,
        "validation": sum(trainer.num_val_batches) if trainer.state.fn in ("fit", "validate") else 0,
        "test": sum(trainer.num_test_batches) if trainer.state.fn == "test" else 0,
        "prediction": sum(trainer.num_predict_batches) if trainer.state.fn == "predict" else 0,
    }
    parts = [f"{count} {stage} batch{'es' * (count != 1)}" for stage, count in stages.items() if count]
    say(f"fast_dev_run: {' and '.join(parts)} without a failure; nothing was saved")
