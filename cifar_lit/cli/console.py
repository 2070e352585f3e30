"""What is printed around a run: the card at its start, and the results at its end."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from cifar_lit.runs.run_folder import display_path
from cifar_lit.text import printable, say

if TYPE_CHECKING:  # for commands that need no torch
    import lightning.pytorch as pl

    from cifar_lit.data.datamodule import ImageData
    from cifar_lit.train import Run
    from cifar_lit.training.metrics import Score


class TextConsole(Console):
    """rich's, but a text is no markup there, has no emoji by name, and nothing that a terminal obeys."""

    def render_str(self, text: str, **settings: Any) -> Text:
        """What becomes of every text that is printed, and of each in a table."""
        return super().render_str(printable(text), **{**settings, "markup": False, "emoji": False})


def for_tables() -> Console:
    """As wide as the terminal; elsewhere so wide that no row is folded, which rich would do at 80 columns."""
    return TextConsole(width=None if sys.stdout.isatty() else 200, highlight=False)


def print_start_card(run: Run, trainer: pl.Trainer, model: Any, data: ImageData) -> None:
    """Prints what is about to run, as a box on a terminal and as plain lines elsewhere."""
    train, val = (len(part) for part in data.split)
    channels, height, width = data.input_shape
    world, batch_size = trainer.world_size, data.batch_size
    share = batch_size // world
    exact = "=" if share * world == batch_size else "≈"
    device, h, notes = trainer.strategy.root_device.type, model.hparams, run.notes
    parameters = sum(parameter.numel() for parameter in model.net.parameters())
    kept = f"in the memory of {device}" if data.placed("train")[1] == "device" else f"read by {data.workers} workers"
    size = f"{channels}×{height}×{width}"
    smaller = "".join(f"{side} px for {part:.0%}, " for side, part in data.resolutions.items()) if data.resolutions else ""
    resumed = f"{notes.get('resume')} at epoch {trainer.current_epoch + 1}, step {trainer.global_step}"
    least, most = data.class_counts.aminmax()
    settings = {"class weights": h["class_weights"], "sampling": data.sampling}
    unequal = "".join(f" · {name} {value}" for name, value in settings.items() if value != "none")
    steps = -(-int(trainer.num_training_batches) // trainer.accumulate_grad_batches)
    epochs = f"{data.epochs} epochs" if data.epochs else "no last epoch"
    skips = f"the easiest {data.skip_easy:.0%} of the images from {data.skip_from:.0%} of the steps on" if data.skip_easy else ""
    rows = {
        "data": f"{data.dataset} · train {train:,} · validation {val:,} · {data.class_count} classes · {size} · {kept}",
        "classes": f"{least:,} … {most:,} training images each{unequal}" if unequal else "",
        "sizes": f"{smaller}then {height} px" if smaller else "",
        "skips": skips,
        "net": f"{h['net']} · {parameters:,} parameters" + (f" · weights {h['weights']}" if h["weights"] else ""),
        "trains": notes.get("trains", ""),
        "devices": f"{world} × {device}",
        "precision": str(trainer.precision) + (f" ({notes['precision']})" if "precision" in notes else ""),
        "batch": f"{batch_size} {exact} {world} × {share} · {steps:,} steps an epoch",
        "optimizer": f"{h['optimizer']} · lr {h['lr']:g} · {h['schedule']} · {epochs} · seed {data.seed}",
        "resumes": resumed if "resume" in notes else "",
        "run": "" if trainer.fast_dev_run else display_path(run.folder.path),  # type: ignore[attr-defined]
    }
    rows = {name: value for name, value in rows.items() if value}
    if not sys.stdout.isatty():
        say(*(f"{name:<12} {value}" for name, value in rows.items()))
        return
    grid = Table.grid(Column(style="dim"), Column(), padding=(0, 2))
    for row in rows.items():
        grid.add_row(*row)
    for_tables().print(Panel(grid, title="cifar-lit", title_align="left", expand=False))


def accuracy_table(score: Score, data: ImageData) -> Table:
    """The accuracy of each class; of more than 30 only the ten best and the ten worst."""
    columns = (Column(name, justify="right") for name in ("accuracy", "images"))
    table = Table("class", *columns, title="test accuracy per class", title_justify="left", title_style="")
    classes = list(zip(data.classes, score.per_class, map(sum, score.confusion), strict=True))
    if len(classes) > 30:
        classes = sorted((row for row in classes if row[2]), key=lambda row: -row[1])
    rows = [(name, f"{accuracy:.4f}" if count else "no image", str(count)) for name, accuracy, count in classes]
    for row in rows if len(rows) <= 30 else [*rows[:10], ("…", "", ""), *rows[-10:]]:
        table.add_row(*row)
    return table


# Figures of metrics.json beside accuracy and loss, and what the console calls them.
FIGURES = {"balanced_accuracy": "balanced accuracy", "macro_f1": "macro F1", "top5": "top-5 accuracy"}
MAX_HALF_WIDTH = 0.02  # of the accuracy's interval, above which a test set is called small


def figures_text(scores: Mapping[str, Any]) -> str:
    """Beside accuracy and loss, of the test's or the validation's part of metrics.json: the accuracy's interval, F1 and so on."""
    interval = ["95 % interval of the accuracy {:.4f} … {:.4f}".format(*scores["interval"])] if scores["interval"] else []
    return " · ".join([*interval, *(f"{text} {scores[name]:.4f}" for name, text in FIGURES.items() if name in scores)])


def small_set_text(scores: Mapping[str, Any], is_fold: bool = False) -> str | None:
    """How little a small test set tells; None of one that tells more. is_fold: it is one of a cross-validation already.

    Two equally good runs differ by less with probability 0.95 if each is tested on as many images of its own: Newcombe, Interval
    Estimation for the Difference Between Independent Proportions, 1998, method 10. On the same images `compare` sees more.
    """
    accuracy, (low, high) = scores["accuracy"], scores["interval"] or (0.0, 0.0)
    if (high - low) / 2 <= MAX_HALF_WIDTH:
        return None
    chance = math.hypot(accuracy - low, high - accuracy)
    which = f"{100 * accuracy:.1f} % ({100 * low:.1f} … {100 * high:.1f} %, {scores['images']} images)"
    differences = f"differences between runs below {100 * chance:.1f} points may be chance"
    remedy = "" if is_fold else "; --folds 5 tests on every image"
    return f"a small test set: accuracy {which}, and {differences}{remedy}"


def print_results(run: Run, metrics: dict[str, Any], test: Score | None, data: ImageData) -> None:
    """Prints the results and the next commands."""
    if test:
        for_tables().print(accuracy_table(test, data))
        if views := metrics["test"].get("tta"):
            say(f"with {views['views']} test-time views accuracy {views['accuracy']:.4f} · loss {views['loss']:.4f}")
        for name, value in test.metrics.items():
            say(f"test {name} {value:.4f}")
        say(f"test {figures_text(metrics['test'])}", *filter(None, [small_set_text(metrics["test"], data.folds > 0)]))
        say(f"test accuracy {test.accuracy:.4f} · loss {test.loss:.4f} · {test.images} images")
    elif val := metrics["val"]:
        known = ("accuracy", "loss", "interval", *FIGURES)
        own = "".join(f" · {name} {value:.4f}" for name, value in val.items() if name not in known)
        say(f"validation {figures_text(val)}")
        say(f"validation accuracy {val['accuracy']:.4f} · loss {val['loss']:.4f}{own}")
    if run.trains:
        rate = f" · {metrics['images_per_second']:.0f} images/s" if metrics["images_per_second"] else ""
        say(f"trained in {metrics['train_seconds']:.1f} s{rate}")
    folder = display_path(run.folder.path)
    say(f"run {folder}")
    if run.trains:
        say("", "next:", f"  tensorboard --logdir {shlex.quote(display_path(run.folder.path.parent))}")
        if test is None:
            checkpoint = f"{folder}/checkpoints/{'best' if run.best.best_model_path else 'last'}.ckpt"
            say(f"  cifar-lit test --ckpt_path {shlex.quote(checkpoint)}")
        say(f"  cifar-lit report {shlex.quote(folder)} --open", f"  cifar-lit classify {shlex.quote(folder)} PICTURES")
        code = f"import cifar_lit; print(cifar_lit.load({folder!r}))"
        code = f'"{code}"' if shlex.quote(folder) == folder else shlex.quote(code)  # a shell looks for commands between "
        say(f"  python -c {code}")
