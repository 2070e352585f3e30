"""Results of groups of test images reach metrics.json, the predictions, the report and the console."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from contract.command_line import OWN_IMAGES, SMALL, draw_folder, metrics_of, rows_of, run_command
from run.test_schema import errors


def test_groups_of_test_images_have_results_everywhere() -> None:
    draw_folder(Path("own"), {"cat": 20, "dog": 20})
    lines = ["path,label,split,camera"]
    for number in range(20):
        part, camera = ("train", "test")[number % 2], ("east", "west")[number // 2 % 2]
        lines += [f"{name}/{number}.png,{name},{part},{camera}" for name in ("cat", "dog")]
    Path("own/labels.csv").write_text("\n".join(lines))
    words = (*SMALL, *OWN_IMAGES, "--data-dir", "own/labels.csv", "--data.val_size", "4", "--epochs", "1")
    answer = run_command(*words, "--data.groups", "camera")
    assert answer.code == 0, answer.err
    run = Path("lightning_logs/small-1")
    metrics = metrics_of(run)
    assert errors(metrics) == []
    group, other = metrics["test"]["groups"]["camera"]
    assert {group["value"], other["value"]} == {"east", "west"} and group["images"] == other["images"] == 10
    rows = [row for row in rows_of(run / "predictions.csv") if row["group_camera"] == group["value"]]
    right = sum(row["label"] == row["predicted"] for row in rows)
    assert (group["images"], group["accuracy"]) == (len(rows), pytest.approx(right / len(rows)))
    line = "0 of 2 groups by camera worse than all images by more than chance"
    assert line in answer.lines
    page = (run / "report.html").read_text()
    assert line in page and re.search(r'<h3>camera</h3>.*?<th scope="row">west</th><td>10</td>', page, re.DOTALL)
