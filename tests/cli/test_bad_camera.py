"""Groups of test images on the command line: a data set with one bad camera, from the training to `compare`."""

from __future__ import annotations

import csv
import re
import shutil
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest
from contract.command_line import (
    OWN_IMAGES,
    RECIPE,
    SMALL,
    Training,
    assert_refused,
    metrics_of,
    rows_of,
    run_command,
)
from jsonschema import Draft202012Validator
from PIL import Image, ImageFilter
from run.test_schema import SCHEMA

CAMERAS = ("east", "north", "south", "west")


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a table of striped pictures. Those of the camera `west` are blurred in the test, without a stripe left."""
    folder, generator = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
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


@pytest.fixture(scope="session")
def grouped(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Train on these images, with their groups reported."""
    folder = tmp_path_factory.mktemp("grouped")
    (folder / "small.yaml").write_text(RECIPE)
    words = (*SMALL, *OWN_IMAGES, "--data-dir", photos, "--epochs", "4")
    with chdir(folder):
        answer = run_command(*words, "--data.groups", "camera,site")
    assert answer.code == 0, answer.err
    return Training(folder / "lightning_logs/small-1", answer)


def test_a_hidden_bad_camera_is_named_in_the_report_and_on_the_console(grouped: Training) -> None:
    test = metrics_of(grouped.run_dir)["test"]
    assert not [*Draft202012Validator(SCHEMA).iter_errors(metrics_of(grouped.run_dir))]
    by_camera = test["groups"]["camera"]
    assert [by_camera[0]["value"], *sorted(group["value"] for group in by_camera[1:])] == ["west", *CAMERAS[:3]]
    assert by_camera[0]["interval"][1] < min(group["accuracy"] for group in by_camera[1:])
    for column in ("camera", "site"):
        assert sum(group["images"] for group in test["groups"][column]) == 160
    assert by_camera[0]["coverage"] < min(group["coverage"] for group in by_camera[1:])
    rows = [row for row in rows_of(grouped.run_dir / "predictions.csv") if row["group_camera"] == "west"]
    right = sum(row["label"] == row["predicted"] for row in rows)
    assert (by_camera[0]["images"], by_camera[0]["accuracy"]) == (len(rows), pytest.approx(right / len(rows)))
    line = f"worst of 4 groups by camera: west with accuracy {right / len(rows):.4f} ("
    assert any(each.startswith(line) for each in grouped.answer.lines)
    page = (grouped.run_dir / "report.html").read_text()
    assert f"<p><strong>W{line[1:]}" in page
    assert re.search(r'<h3>camera</h3>.*?<th scope="row">west</th><td>40</td>.*?<h3>site</h3>', page, re.DOTALL)


def test_compare_names_the_group_that_got_worse(grouped: Training, working_folder: Path) -> None:
    for name in ("small-1", "small-2"):
        shutil.copytree(grouped.run_dir, f"logs/{name}")
    file = Path("logs/small-2/predictions.csv")
    rows = rows_of(file)
    for row in rows:
        if row["group_camera"] == "east":
            row["predicted"] = "no class"
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    answer = run_command("compare", "logs/small-1", "logs/small-2")
    assert answer.code == 0, answer.err
    lines = [line for line in answer.lines if "is worse" in line]
    assert lines[0].startswith("  camera east: logs/small-2 is worse (p = ")
    assert not any("camera west" in line for line in lines)


def test_an_unknown_column_is_refused_with_the_nearest_name(photos: Path) -> None:
    words = (*SMALL, *OWN_IMAGES, "--data-dir", photos, "--data.groups", "camera,sites")
    assert_refused(run_command(*words), 2, "has no column 'sites' for data.groups", "Did you mean site?")
    assert_refused(run_command(*SMALL, "--data.groups", "camera"), 2, "the images of shapes have no 'camera'")
