"""`train --learning-curve`: train on 25, 50, 75 and 100 % of the training images.

All trainings have the same settings, epochs, validation and test images. So fewer images mean fewer steps.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from cifar_lit.cli.console import for_tables
from cifar_lit.cli.flags import Command
from cifar_lit.cli.several import check_several, group_folder, train_each
from cifar_lit.errors import Failure
from cifar_lit.files import atomic_write, write_text
from cifar_lit.runs.learning_curve import FILE, PICTURE, draw, read_points
from cifar_lit.runs.run_folder import display_path, read_metrics
from cifar_lit.text import say

SETTING = "data.split.share"
SHARES = (0.25, 0.5, 0.75, 1.0)
WORST = 3  # classes in the table


def train_shares(command: Command) -> None:
    """Train on each share, and write and print the curve. A repeated command continues an unfinished curve."""
    resume_remedy = "continues an unfinished curve by itself: leave --resume out"
    check_several(command, "--learning-curve", resume_remedy, SETTING)
    with group_folder(command, "curve", FILE, lambda content: "points" not in content) as (path, record):
        trainings = {f"{share:.0%} of the training images": {SETTING: share} for share in SHARES}
        runs = train_each(command, trainings, path)
        finish(path, record, {display_path(run): read_metrics(run) for run in runs})


def finish(path: Path, record: Mapping[str, object], runs: Mapping[str, Mapping[str, Any]]) -> None:
    """Write learning-curve.json and learning-curve.png, and print the results. runs: metrics.json by run folder."""
    points = read_points([*runs.values()])
    if len(points) < len({metrics["data"]["train"] for metrics in runs.values()}):  # shares of few groups may be equal
        reason = "its images have changed between the trainings"
        raise Failure(f"{display_path(path)} has no curve: {reason}. Remove the folder, and start again")
    results = {"runs": [*runs], "points": points}
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
    report = f"  cifar-lit report {shlex.quote([*runs][-1])} --open"
    say(f"results {display_path(path)}", "", "next:", report)
