"""`train --learning-curve`: train on 25, 50, 75 and 100 % of the training images, and estimate what more images give.

All trainings have the same settings, epochs, validation and test images. So fewer images mean fewer steps.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from cifar_lit.cli.console import for_tables
from cifar_lit.cli.fit import TrainingCLI, program
from cifar_lit.cli.flags import Command, recipe_path
from cifar_lit.cli.launch import logs_of
from cifar_lit.cli.several import check_several, train_each
from cifar_lit.errors import Failure, UsageError
from cifar_lit.files import atomic_write, read_text, write_text
from cifar_lit.runs.learning_curve import FILE, PICTURE, draw, overall, read_points
from cifar_lit.runs.run_folder import RunFolder, display_path, read_json, read_metrics
from cifar_lit.text import say
from cifar_lit.training.orderly_stop import Interrupted

SETTING = "data.train_share"
SHARES = (0.25, 0.5, 0.75, 1.0)
WORST = 3  # classes in the table


def train_shares(command: Command) -> None:
    """Train on each share, and write and print the curve. A repeated command continues an unfinished curve."""
    if command.asks_only:
        TrainingCLI(command)
        return
    check_several(command, "--learning-curve", "continues an unfinished curve by itself: leave --resume out")
    if command.value(SETTING) is not None:
        raise UsageError(f"--learning-curve sets {SETTING}: leave it out")
    recipe = [recipe_path(command.recipe)] if command.recipe else []
    texts = [read_text(path.expanduser()) for path in (*recipe, *map(Path, command.configs))]
    record = {"command": command.words, "settings": sha256("\0".join(texts).encode()).hexdigest()}
    name, logs = "-".join([*(path.stem for path in recipe), "curve"]), logs_of(command)
    unfinished = (path.parent for path in logs.glob(f"*/{FILE}") if read_json(path) == record)
    folder = RunFolder(logs, name, next(unfinished, None))
    path = folder.path
    try:
        write_text(path / FILE, json.dumps(record) + "\n")
        trainings = {f"{share:.0%} of the training images": {SETTING: share} for share in SHARES}
        words = [word for word in command.words if word != "--learning-curve"]
        runs = train_each(replace(command, learning_curve=False, words=words), trainings, path)
        finish(path, record, {display_path(run): read_metrics(run) for run in runs})
    except Interrupted as interruption:
        interruption.resume = f"{program(sys.argv[0], 'train')} {shlex.join(command.words)}"
        raise
    finally:
        folder.release()
        if [entry.name for entry in path.iterdir()] == [FILE]:  # the first training failed before it had a folder
            (path / FILE).unlink()
            path.rmdir()


def finish(path: Path, record: Mapping[str, Any], runs: Mapping[str, Mapping[str, Any]]) -> None:
    """Write learning-curve.json and learning-curve.png, and print the results. runs: metrics.json by run folder."""
    points = read_points([*runs.values()])
    if len(points) < len(runs):
        reason = "its images have changed between the trainings, or are too few for four shares"
        raise Failure(f"{display_path(path)} has no curve: {reason}. Remove the folder, and start again")
    twice = 2 * points[-1]["images"]
    law = overall(points, [twice])
    (expected,) = law.pop("accuracy")
    results = {"runs": [*runs], "points": points, "law": law, "twice": {"images": twice, "accuracy": expected}}
    write_text(path / FILE, json.dumps({**record, **results}, indent=2, ensure_ascii=False) + "\n")
    with atomic_write(path / PICTURE) as partial:
        draw(points, partial)
    accuracies = points[-1]["per_class"]
    worst = sorted(accuracies, key=accuracies.__getitem__)[:WORST]
    columns = [Column(title, justify="right") for title in ("images", "accuracy", "95 % interval", *worst)]
    table = Table(*columns, title="test accuracy, and that of the worst classes", title_justify="left", title_style="")
    for point in points:
        numbers = f"{point['images']:,}", f"{point['accuracy']:.4f}", "{:.4f} … {:.4f}".format(*point["interval"])
        table.add_row(*numbers, *(f"{point['per_class'][name]:.4f}" for name in worst))
    for_tables().print(table)
    say(
        "error = a + b·n^-c: a {:.3f} ({:.3f} … {:.3f}), c {:.2f} ({:.2f} … {:.2f})".format(*law["a"], *law["c"]),
        f"expected with {twice:,} images: accuracy " + "{:.4f}, 95 % interval {:.4f} … {:.4f}".format(*expected),
        f"results {display_path(path)}",
    )
