"""Groups of test images: a training on a data set with one bad camera."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pytest
from contract.command_line import (
    OWN_IMAGES,
    SMALL,
    metrics_of,
    rows_of,
    run_command,
)
from PIL import Image, ImageFilter
from run.test_schema import errors

CAMERAS = ("east", "north", "south", "west")


def write_photos(folder: Path) -> Path:
    """Write a table of striped pictures. Those of the camera `west` are blurred in the test, without a stripe left."""
    generator = np.random.default_rng(0)
    rows = []
    for part, count in (("train", 240), ("test", 160)):
        for number in range(count):
            pixels = generator.integers(0, 60, (16, 16, 3), np.uint8)
            pixels[number // 2 % 4 :: 4] += 150
            if number % 2:
                pixels = pixels.swapaxes(0, 1)
            camera, picture = CAMERAS[number // 2 % 4], Image.fromarray(pixels)
            if part == "test" and camera == "west":
                picture = picture.filter(ImageFilter.GaussianBlur(8))
            name = f"{part}-{number}.png"
            picture.save(folder / name)
            rows.append((name, ("across", "down")[number % 2], part, camera, f"site {number // 8 % 2}"))
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "split", "camera", "site"), *rows])
    return folder / "labels.csv"


def test_a_hidden_bad_camera_is_named_in_the_report_and_on_the_console(working_folder: Path) -> None:
    words = (*SMALL, *OWN_IMAGES, "--data-dir", write_photos(working_folder), "--epochs", "4")
    answer = run_command(*words, "--data.groups", "camera,site")
    assert answer.code == 0, answer.err
    run = Path("lightning_logs/small-1")
    assert errors(metrics_of(run)) == []
    test = metrics_of(run)["test"]
    by_camera = test["groups"]["camera"]
    assert [by_camera[0]["value"], *sorted(group["value"] for group in by_camera[1:])] == ["west", *CAMERAS[:3]]
    assert by_camera[0]["interval"][1] < min(group["accuracy"] for group in by_camera[1:])
    for column in ("camera", "site"):
        assert sum(group["images"] for group in test["groups"][column]) == 160
    assert by_camera[0]["coverage"] < min(group["coverage"] for group in by_camera[1:])
    rows = [row for row in rows_of(run / "predictions.csv") if row["group_camera"] == "west"]
    right = sum(row["label"] == row["predicted"] for row in rows)
    assert (by_camera[0]["images"], by_camera[0]["accuracy"]) == (len(rows), pytest.approx(right / len(rows)))
    line = (
        f"1 of 4 groups by camera worse than all images by more than chance: west with accuracy {right / len(rows):.4f}"
    )
    assert any(each.startswith(line) for each in answer.lines)
    page = (run / "report.html").read_text()
    assert f"<p><strong>{line}" in page
    assert re.search(r'<h3>camera</h3>.*?<th scope="row">west</th><td>40</td>.*?<h3>site</h3>', page, re.DOTALL)
