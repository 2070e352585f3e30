"""What a training prints about itself: the card at its start, and the results at its end."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from cifar_lit.cli import console
from cifar_lit.data.datamodule import ImageData
from cifar_lit.runs.run_folder import display_path
from cifar_lit.training.metrics import Score

if TYPE_CHECKING:
    from cifar_lit.train import Run


def card_rows(run: Run, trainer: pl.Trainer, model: Any, data: ImageData) -> list[tuple[str, str]]:
    """What is about to run, by name."""
    train, val = (len(part) for part in data.split)
    channels, height, width = data.input_shape
    world, batch_size = trainer.world_size, data.batch_size
    share = batch_size // world
    exact = "=" if share * world == batch_size else "≈"
    device, h, notes = trainer.strategy.root_device.type, model.hparams, run.notes
    parameters = sum(parameter.numel() for parameter in model.net.parameters())
    kept = f"in the memory of {device}" if data.placed("train")[1] == "device" else f"read by {data.workers} workers"
    size = f"{channels}×{height}×{width}"
    rows = [
        ("data", f"{data.dataset} · train {train:,} · validation {val:,} · {data.class_count} classes · {size} · {kept}"),
        ("net", f"{h['net']} · {parameters:,} parameters"),
        ("devices", f"{world} × {device}"),
        ("precision", str(trainer.precision) + (f" ({notes['precision']})" if "precision" in notes else "")),
        ("batch", f"{batch_size} {exact} {world} × {share} · {trainer.num_training_batches:,} steps an epoch"),
        ("optimizer", f"{h['optimizer']} · lr {h['lr']:g} · {h['schedule']} · {trainer.max_epochs} epochs · seed {data.seed}"),
    ]
    if data.resolutions:
        smaller = "".join(f"{side} px for {share:.0%}, " for side, share in data.resolutions.items())
        rows.insert(1, ("sizes", f"{smaller}then {height} px"))
    if "resume" in notes:
        rows.append(("resumes", f"{notes['resume']} at epoch {trainer.current_epoch + 1}, step {trainer.global_step}"))
    if not trainer.fast_dev_run:  # type: ignore[attr-defined]
        rows.append(("run", display_path(run.folder.path)))
    return rows


def print_results(run: Run, metrics: dict[str, Any], test: Score | None, data: ImageData) -> None:
    """Prints the results and the next commands."""
    if test:
        console.accuracy_table(data.classes, test.per_class, [sum(row) for row in test.confusion])
        if views := metrics["test"].get("tta"):
            console.say(f"with {views['views']} test-time views accuracy {views['accuracy']:.4f} · loss {views['loss']:.4f}")
        for name, value in test.metrics.items():
            console.say(f"test {name} {value:.4f}")
        console.say(f"test accuracy {test.accuracy:.4f} · loss {test.loss:.4f} · {test.images} images")
    elif val := metrics["val"]:
        further = "".join(f" · {name} {value:.4f}" for name, value in val.items() if name not in ("accuracy", "loss"))
        console.say(f"validation accuracy {val['accuracy']:.4f} · loss {val['loss']:.4f}{further}")
    if run.trains:
        console.say(f"trained in {metrics['train_seconds']:.1f} s · {metrics['images_per_second'] or 0:.0f} images/s")
    folder = display_path(run.folder.path)
    console.say(f"run {folder}")
    if run.trains:
        console.say("", "next:", f"  tensorboard --logdir {shlex.quote(display_path(run.folder.path.parent))}")
        if test is None:
            checkpoint = f"{folder}/checkpoints/{'best' if run.best.best_model_path else 'last'}.ckpt"
            console.say(f"  cifar-lit test --ckpt_path {shlex.quote(checkpoint)}")
        console.say(f"  cifar-lit report {shlex.quote(folder)} --open", f"  cifar-lit classify {shlex.quote(folder)} PICTURES")
        console.say(f"  python -c \"import cifar_lit; print(cifar_lit.load('{folder}'))\"")
