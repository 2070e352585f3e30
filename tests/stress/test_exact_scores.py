"""One checkpoint scored on one, two and three processes, on sets of every size: equal to the last digit."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from stress.compare_runs import run_in
from stress.forked import Forked, size

from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.image_set import ImageSet
from cifar_lit.training.checkpoint import read_checkpoint
from cifar_lit.training.classifier import ImageClassifier

LARGEST, BATCH = 1003, 32  # images of the whole set, and of a batch: below it a set gives all but one process nothing to do
DATA: dict[str, Any] = {
    "count": 5 * LARGEST, "val_size": 500, "image_size": 16, "mean": 0.5, "std": 0.25, "eval_batch_size": BATCH,
}  # fmt: skip
TRAINING = [
    *("train", "--recipe", "quickstart", "--accelerator", "cpu", "--precision", "32-true", "--epochs", "2"),
    *(word for name, value in DATA.items() for word in (f"--data.{name}", str(value))),
]
SOME = [1, 2, 3, 31, 32, 33, 97, LARGEST]
LIMIT = 1800.0  # seconds that the processes of one number may take for all sizes


def score_sizes(sizes: list[int], folder: str) -> dict[str, Any]:
    """The lines of each rank of 1, 2 and 3 processes, and the score of the training's own test."""
    place = Path(folder)
    Forked(TRAINING, place, place / "log.txt").finish(LIMIT)
    run = run_in(place / "lightning_logs")
    assert run is not None
    best = run / "checkpoints" / "best.ckpt"
    for world in (1, 2, 3):
        Forked(lambda: score_all(best, sizes, place), place, place / "log.txt", world).finish(LIMIT)
    ranks = [(world, rank) for world in (1, 2, 3) for rank in range(world)]
    lines = {f"{world}-{rank}": (place / f"{world}-{rank}.txt").read_text().splitlines() for world, rank in ranks}
    return {"lines": lines, "own": json.loads((run / "metrics.json").read_text())["test"]}


def score_all(checkpoint: Path, sizes: Sequence[int], folder: Path) -> int:
    """In each process: scores the first images of the test set by the Trainer, and writes a line of each size; returns 0."""
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    contents = read_checkpoint(checkpoint)
    model = ImageClassifier(**contents["hyper_parameters"])
    model.load_state_dict(contents["state_dict"])
    whole = ImageData("shapes", **DATA).test_images
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    with (folder / f"{world}-{rank}.txt").open("w") as file:
        for size in sizes:
            data = ImageData("shapes", **DATA)
            data.parts.train_images = whole  # which is asked for its number of channels; drawing it takes seconds
            data.parts.test_images = ImageSet(whole.images[:size], whole.labels[:size], whole.classes)
            trainer = pl.Trainer(accelerator="cpu", devices=world, strategy="ddp", use_distributed_sampler=False, **quiet)
            trainer.test(model, datamodule=data, verbose=False)
            predictions = model.predictions
            assert model.score is not None and predictions is not None
            digests = [hashlib.sha256(each.numpy().tobytes()).hexdigest() for each in predictions.values()]
            file.write(json.dumps({"size": size, **model.score._asdict(), "predictions": digests}) + "\n")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0


@pytest.mark.stress
def test_a_checkpoint_scores_the_same_to_the_last_digit_on_any_number_of_processes(
    forking: Callable[..., Any], write_counts: Callable[..., None], tmp_path: Path
) -> None:
    sizes = sorted({*range(1, size("SIZES", LARGEST) + 1), *SOME})
    done = forking(score_sizes, sizes=sizes, folder=str(tmp_path))
    alone = done["lines"].pop("1-0")
    assert [json.loads(line)["size"] for line in alone] == sizes
    # the texts of the lines have all digits of their numbers; nan, of classes without an image, equals itself
    for rank, lines in done["lines"].items():
        wrong = [size for size, one, other in zip(sizes, alone, lines, strict=True) if one != other]
        assert wrong == [], rank
    whole, own = json.loads(alone[-1]), done["own"]
    assert [whole[name] for name in ("accuracy", "loss", "images")] == [own[name] for name in ("accuracy", "loss", "images")]
    assert whole["accuracy"] > 0.2  # ten classes: the checkpoint has learned something
    label = "sizes × 2 and 3 processes, scores equal to the last digit to those of one"
    write_counts({"batch": BATCH, "headline": {label: 2 * len(sizes)}, "unit": {label: f"of {2 * len(sizes)}"}})
