"""`cifar-lit drill exact`: one checkpoint scored on one, two and three processes, which must agree to the last digit."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from jsonargparse import ArgumentParser, Namespace

from cifar_lit.bench.report import environment, footer, headline, settings_of, show, write_figures
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.image_set import ImageSet
from cifar_lit.drills.forked import Forked, warm
from cifar_lit.drills.survivors import run_in
from cifar_lit.errors import Failure, UsageError
from cifar_lit.runs.predictions import write_predictions
from cifar_lit.training.checkpoint import read_checkpoint
from cifar_lit.training.classifier import ImageClassifier

WHAT = (
    "Scores one checkpoint on the first 1, 2, 3 … images of a test set, on 1, 2 and 3 processes (gloo), and compares accuracy, "
    "loss, per-class accuracies, confusion matrix and every image's probabilities: they must be equal to the last digit, and on "
    "the whole set those of the training's own test."
)
LARGEST, BATCH = 1003, 32  # images of the whole set, and of a batch: below it a set gives all but one process nothing to do
DATA = {"count": 5 * LARGEST, "val_size": 500, "image_size": 16, "mean": 0.5, "std": 0.25, "eval_batch_size": BATCH}
TRAINING = [
    *("train", "--recipe", "quickstart", "--accelerator", "cpu", "--precision", "32-true", "--epochs", "2"),
    *(word for name, value in DATA.items() for word in (f"--data.{name}", str(value))),
]
PROCESSES = (1, 2, 3)
SHOWN = (1, 2, 31, 32, 33, 64, 97, 250, 500, 1002, LARGEST)  # sizes that the report shows
LIMIT = 1800.0  # seconds that the processes of one number may take for all sizes


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of this drill."""
    parser.add_argument("--sizes", type=str, default=f"1-{LARGEST}", help=f"of the sets, as in 1,2,30-33; at most {LARGEST}")


SHORT = {"sizes": f"1-3,31-33,97,{LARGEST}"}


def sizes_from(text: str) -> list[int]:
    """The whole numbers that `1,2,30-33` names, in their order; raises UsageError for what is none, or too large a set."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None:
            raise UsageError(f"--sizes is a list such as 1,2,30-33, not {text}")
        first = int(match[1])
        found |= set(range(first, int(match[2] or first) + 1))
    if not found or min(found) < 1 or max(found) > LARGEST:
        raise UsageError(f"--sizes are sizes of sets from 1 to {LARGEST}, not {text}")
    return sorted(found)


def run(settings: Namespace) -> None:
    """Drills and reports; raises Failure when a score differs."""
    sizes = sizes_from(settings.sizes)
    warm()
    with tempfile.TemporaryDirectory(prefix="cifar-lit-drill-") as name:
        folder = Path(name)
        trained = _trained(folder)
        seconds, found = {}, {}
        for world in PROCESSES:
            started = time.monotonic()
            scoring = Forked(
                lambda: score_all(trained / "checkpoints" / "best.ckpt", sizes, folder), folder, folder / "log.txt", world
            )
            if any(scoring.wait(LIMIT)):
                raise Failure(f"scoring on {world} processes failed: {scoring.log.read_text()[-800:]}")
            seconds[world] = time.monotonic() - started
            found[world] = [_lines(folder / f"{world}-{rank}.txt") for rank in range(world)]
        own = json.loads((trained / "metrics.json").read_text())["test"]
    report(settings, sizes, found, own, seconds)


def _trained(folder: Path) -> Path:
    """The run of a short training, whose test scored the whole set in one process."""
    training = Forked(TRAINING, folder, folder / "log.txt")
    if any(training.wait(LIMIT)):
        raise Failure(f"the training failed: {training.log.read_text()[-800:]}")
    run = run_in(folder / "lightning_logs")
    assert run is not None
    return run


def score_all(checkpoint: Path, sizes: Sequence[int], folder: Path) -> int:
    """In each process: scores the first images of the test set by the Trainer, and writes a line of each size; returns 0."""
    from cifar_lit.cli.app import TRAINER_DEFAULTS

    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    contents = read_checkpoint(checkpoint)
    model = ImageClassifier(**contents["hyper_parameters"])
    model.load_state_dict(contents["state_dict"])
    data = ImageData("shapes", **DATA)  # type: ignore[arg-type]
    whole = data.test_images
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    with (folder / f"{world}-{rank}.txt").open("w") as file:
        for size in sizes:
            data = ImageData("shapes", **DATA)  # type: ignore[arg-type]
            data.train_images = whole  # which is asked for its number of channels; drawing it takes seconds
            data.test_images = ImageSet(whole.images[:size], whole.labels[:size], whole.classes)
            settings = {**TRAINER_DEFAULTS, **quiet, "precision": "32-true"}
            trainer = pl.Trainer(accelerator="cpu", devices=world, strategy="ddp", **settings)
            trainer.test(model, datamodule=data, verbose=False)
            assert model.score is not None and model.outcomes is not None
            told = [hashlib.sha256(each.numpy().tobytes()).hexdigest() for each in model.outcomes.values()]
            line = {"size": size, **model.score._asdict(), "outcomes": told}
            if rank == 0:
                path = folder / f"{world}.csv"
                write_predictions(path, whole.classes, [model.outcomes])
                line["file"] = hashlib.sha256(path.read_bytes()).hexdigest()
            file.write(json.dumps(line) + "\n")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0


def _lines(path: Path) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["size"]: line for line in lines}


def unequal_scores(one: dict[str, Any], others: Sequence[dict[str, Any]]) -> list[str]:
    """What of a size's scores differs from that of one process in any digit; `file` is known to first processes only."""
    return sorted({name for other in others for name in other if _digits(other[name]) != _digits(one[name])})


def _digits(value: Any) -> str:
    """A text of a nested value that has all digits of its numbers; nan, of classes without an image, equals itself."""
    return json.dumps(value)


def report(
    settings: Namespace,
    sizes: Sequence[int],
    found: dict[int, list[dict[int, dict[str, Any]]]],
    own: dict[str, Any],
    seconds: dict[int, float],
) -> None:
    """Prints how many sizes are equal, and some of the scores; writes the figures; raises Failure when one differs."""
    (alone,) = found[1]
    wrong = {
        (world, size): names
        for world, ranks in found.items()
        for size in sizes
        if (names := unequal_scores(alone[size], [rank[size] for rank in ranks]))
    }
    rows = [
        {
            "processes": world,
            "sizes": len(sizes),
            "equal": sum((world, size) not in wrong for size in sizes),
            "sizes_with_an_idle_process": sum(-(-size // BATCH) < world for size in sizes),
            "seconds": round(seconds[world], 1),
        }
        for world in found
    ]
    shown = [{name: alone[size][name] for name in ("size", "accuracy", "loss")} for size in sizes if size in SHOWN]
    compared = sum(row["sizes"] for row in rows if row["processes"] > 1)
    equal = sum(row["equal"] for row in rows if row["processes"] > 1)
    figures: dict[str, Any] = {
        "bench": "exact",
        "command": "drill exact",
        "settings": settings_of(settings),
        "batch": BATCH,
        "processes": rows,
        "scores": shown,
        **headline(("sizes × 2 and 3 processes, scores equal to the last digit to those of one", equal, f"of {compared}")),
        "environment": environment(),
    }
    if settings.json:
        write_figures(Path(settings.json), figures)
    columns = ("size", "accuracy", "loss")
    show(
        "scores, the same on 1, 2 and 3 processes",
        columns,
        [[str(row["size"]), repr(row["accuracy"]), repr(row["loss"])] for row in shown],
    )
    table = [
        [str(row[name]) for name in ("processes", "sizes", "equal", "sizes_with_an_idle_process", "seconds")] for row in rows
    ]
    compared_with = (
        "compared: accuracy, loss, per-class accuracies, confusion matrix, each image's probabilities, predictions.csv"
    )
    show(
        "to those of one process",
        ("processes", "sizes", "equal", "of these with an idle process", "seconds"),
        table,
        compared_with,
        footer(figures),
    )
    if wrong:
        (world, size), names = next(iter(wrong.items()))
        raise Failure(f"{len(wrong)} scores differ, first that of {size} images on {world} processes, in {', '.join(names)}")
    check_own_test(alone, own)


def check_own_test(alone: dict[int, dict[str, Any]], own: dict[str, Any]) -> None:
    """Raises Failure where the whole set was scored in another way by the training's own test."""
    found = alone.get(LARGEST, own)
    if wrong := [name for name in ("accuracy", "loss", "images") if _digits(found[name]) != _digits(own[name])]:
        raise Failure(f"the training's own test differs: {wrong[0]} {own[wrong[0]]}, and here {found[wrong[0]]}")
