"""`train --learning-curve`: train on 25, 50, 75 and 100 % of the training images, and estimate what more images give.

All trainings have the same settings, number of epochs, validation and test images. So a training on fewer images takes
fewer steps.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
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
from cifar_lit.runs.learning_curve import FILE, PICTURE, SHARES, laws_of, read_points, save_png
from cifar_lit.runs.run_folder import RunFolder, display_path, read_json, read_metrics
from cifar_lit.stats import wilson_interval
from cifar_lit.text import say
from cifar_lit.training.orderly_stop import Interrupted

SETTING = "data.train_share"
WORST = 3  # classes in the table


def train_shares(command: Command) -> None:
    """Train on each share, and write and print the curve. A repeated command continues an unfinished curve."""
    if command.asks_only:
        TrainingCLI(command)
        return
    check_several(command, "--learning-curve", "continues an unfinished curve by itself: leave --resume out")
    if command.value(SETTING) is not None:
        raise UsageError(f"--learning-curve sets {SETTING}: leave it out")
    files = [*command.configs, *([str(recipe_path(command.recipe))] if command.recipe else [])]
    texts = [read_text(Path(file).expanduser()) for file in files]
    record = {"command": command.words, "settings": sha256("\0".join(texts).encode()).hexdigest()}
    name = f"{recipe_path(command.recipe).stem}-curve" if command.recipe else "curve"
    logs = logs_of(command)
    unfinished = (path.parent for path in logs.glob(f"{name}-*/{FILE}") if read_json(path) == record)
    folder = RunFolder(logs, name, next(unfinished, None))
    path = folder.path
    try:
        write_text(path / FILE, json.dumps(record) + "\n")
        trainings: dict[str, dict[str, Any]] = {}
        for number, share in enumerate(SHARES, 1):
            trainings[f"{share:.0%} of the training images ({number} of {len(SHARES)})"] = {SETTING: share}
        runs = train_each(replace(command, learning_curve=False), trainings, path)
        finish(path, record, runs)
    except Interrupted as interruption:
        interruption.resume = f"{program(sys.argv[0], 'train')} --learning-curve {shlex.join(command.words[1:])}"
        raise
    finally:
        folder.release()
        if [entry.name for entry in path.iterdir()] == [FILE]:  # the first training failed before it had a folder
            (path / FILE).unlink()
            path.rmdir()


def finish(path: Path, record: dict[str, Any], runs: Sequence[Path]) -> None:
    """Write learning-curve.json and learning-curve.png, and print the results."""
    points = read_points([read_metrics(run) for run in runs])
    if len(points) < len(runs):
        reason = "the images have changed between these trainings, or two shares have equally many images"
        raise Failure(f"{display_path(path)} has no curve: {reason}. Remove the folder, and start again")
    laws, last = laws_of(points), points[-1]
    images, expected = 2 * last.train, laws.accuracy(2 * last.train)
    rows = []
    for run, point in zip(runs, points, strict=True):
        interval = wilson_interval(round(point.accuracy * point.test), point.test)
        rows.append({"run": display_path(run), **point._asdict(), "interval": interval})
    law = {"a": laws.floor, "c": laws.exponent}
    twice = {"images": images, "accuracy": expected, "gain": laws.gain()}
    result = {**record, "points": rows, "power_law": law, "twice": twice}
    write_text(path / FILE, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    with atomic_write(path / PICTURE) as partial:
        save_png(points, laws, partial)

    tested = [(accuracy, name) for name, accuracy in last.per_class.items() if accuracy is not None]
    worst = [name for _, name in sorted(tested)[:WORST]]
    columns = [Column(title, justify="right") for title in ("images", "accuracy", "95 % interval", *worst)]
    table = Table(*columns, title="test accuracy, and that of the worst classes", title_justify="left", title_style="")
    for point, row in zip(points, rows, strict=True):
        accuracies = [f"{point.per_class.get(name) or 0:.4f}" for name in worst]
        table.add_row(
            f"{point.train:,}", f"{point.accuracy:.4f}", "{:.4f} … {:.4f}".format(*row["interval"]), *accuracies
        )
    for_tables().print(table)
    say(
        "error = a + b·n^-c: a {:.3f} ({:.3f} … {:.3f}), c {:.2f} ({:.2f} … {:.2f})".format(
            *laws.floor, *laws.exponent
        ),
        f"expected with {images:,} images: accuracy " + "{:.4f}, 95 % interval {:.4f} … {:.4f}".format(*expected),
        f"results {display_path(path)}",
    )
