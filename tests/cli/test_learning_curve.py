"""`train --learning-curve`: four trainings on nested shares of the images, continued if the command is repeated."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from contract.command_line import (
    NO_SHAPES,
    RECIPE,
    SMALL,
    assert_refused,
    config_of,
    contents_of,
    draw_folder,
    metrics_of,
    run_command,
    table_rows,
)
from PIL import Image

from cifar_lit.errors import Failure

CURVE = ("train", *SMALL, "--learning-curve")
PARENT = Path("lightning_logs/small-curve-1")


@pytest.fixture(scope="module")
def curve(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return a working folder with a learning curve, and the output of its command."""
    folder = tmp_path_factory.mktemp("curve")
    here = Path.cwd()
    os.chdir(folder)
    try:
        Path("small.yaml").write_text(RECIPE)
        answer = run_command(*CURVE)
        assert answer.code == 0, answer.err
    finally:
        os.chdir(here)
    return folder, answer.out


def test_four_runs_differ_only_in_their_training_images(curve: tuple[Path, str]) -> None:
    folder, out = curve
    runs = [folder / PARENT / f"small-{number}" for number in (1, 2, 3, 4)]
    assert [config_of(run)["data"]["split"]["share"] for run in runs] == [0.25, 0.5, 0.75, 1.0]
    records = [metrics_of(run)["data"] for run in runs]
    assert [record["train"] for record in records] == [40, 80, 120, 160]
    assert {(record["val"], record["test"], record["images"]) for record in records} == {(40, 40, records[0]["images"])}
    assert len({metrics_of(run)["test"]["fingerprint"] for run in runs}) == 1

    results = json.loads((folder / PARENT / "learning-curve.json").read_text())
    points = results["points"]
    assert results["runs"] == [f"{PARENT}/small-{number}" for number in (1, 2, 3, 4)]
    assert [point["accuracy"] for point in points] == [metrics_of(run)["test"]["accuracy"] for run in runs]
    rows = table_rows(out)[-4:]
    assert [row[0] for row in rows] == ["40", "80", "120", "160"] and len(rows[0]) == 6
    assert out.splitlines()[-4:] == [
        f"results {PARENT}", "", "next:", f"  cifar-lit report {PARENT}/small-4 --open"
    ]  # fmt: skip
    assert out.count("next:") == 1 and out.startswith("25% of the training images: test accuracy 0.")
    with Image.open(folder / PARENT / "learning-curve.png") as picture:
        assert picture.format == "PNG"


def test_the_last_run_is_the_ordinary_one_and_its_report_shows_the_curve(
    curve: tuple[Path, str], run_dir: Path
) -> None:
    runs = curve[0] / PARENT
    assert (runs / "small-4/model.safetensors").read_bytes() == (run_dir / "model.safetensors").read_bytes()
    pages = {path.parent.name: path.read_text() for path in runs.glob("*/report.html")}
    assert [name for name, page in pages.items() if "Test accuracy over training images" in page] == ["small-4"]
    ordinary = (run_dir / "report.html").read_text()
    assert "Which classes need images" in ordinary and "<code>train --learning-curve</code> measures" in ordinary


@pytest.mark.slow
def test_a_repeated_command_trains_only_what_is_missing(
    curve: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(curve[0] / "lightning_logs", "lightning_logs")
    record = json.loads((PARENT / "learning-curve.json").read_text())
    unfinished = {name: record[name] for name in ("command", "settings", "learning-curve")}
    (PARENT / "learning-curve.json").write_text(json.dumps(unfinished))
    (PARENT / "small-2/metrics.json").unlink()  # killed after its last checkpoint
    shutil.rmtree(PARENT / "small-3")  # not begun
    kept = contents_of(PARENT / "small-1")
    answer = run_command(*CURVE)
    assert answer.code == 0, answer.err
    assert contents_of(PARENT / "small-1") == kept
    assert answer.out.count("is finished") == 2
    assert {path.name for path in PARENT.iterdir() if path.is_dir()} == {"small-1", "small-2", "small-4", "small-5"}
    assert json.loads((PARENT / "learning-curve.json").read_text())["points"] == record["points"]

    def fail(*arguments: object) -> None:
        raise Failure(f"in {arguments[2]}")

    monkeypatch.setattr("cifar_lit.cli.learning_curve.train_each", fail)
    assert_refused(run_command(*CURVE), 1, "in lightning_logs/small-curve-2")  # the first curve is finished


@pytest.mark.slow
def test_folders_without_validation_images_and_with_few_images_work() -> None:
    draw_folder(Path("animals"), {"cat": 9, "dog": 9, "owl": 4})
    words = (*SMALL, "--dataset", "folder", *NO_SHAPES, "--data-dir", "animals", "--data.val_size", "0")
    answer = run_command(*words, "--epochs", "1", "--learning-curve")
    assert answer.code == 0, answer.err
    assert "5 training images are less than a batch of 32: lower --batch-size" in answer.err
    assert "1 of 3 classes have fewer than 2 training images (owl)" in answer.err
    assert [row[0] for row in table_rows(answer.out)[-4:]] == ["5", "8", "13", "17"]


@pytest.mark.slow
def test_shares_with_the_same_images_are_one_point() -> None:
    draw_folder(Path("animals"), {"cat": 15, "dog": 15})
    rows = [f"animals/{kind}/{row}.png,{kind},{row // 5}" for kind in ("cat", "dog") for row in range(15)]
    Path("animals.csv").write_text("\n".join(["path,label,patient", *rows]) + "\n")
    words = (*SMALL, "--dataset", "folder", *NO_SHAPES, "--data-dir", "animals.csv", "--data.split.group", "patient")
    answer = run_command(*words, "--data.val_size", "0", "--epochs", "1", "--learning-curve")
    assert answer.code == 0, answer.err
    runs = sorted(Path("lightning_logs/small-curve-1").glob("small-*"))
    sizes = [metrics_of(run)["data"]["train"] for run in runs]
    points = json.loads(Path("lightning_logs/small-curve-1/learning-curve.json").read_text())["points"]
    assert [point["images"] for point in points] == sorted({*sizes}) and len(points) < 4
    assert "Test accuracy over training images" in (runs[-1] / "report.html").read_text()


@pytest.mark.parametrize("code", [130, -signal.SIGTERM, 1])
def test_a_stopped_curve_on_two_devices_names_the_command_that_continues_it(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def ended(*_: object, **settings: object) -> Iterator[Any]:
        yield SimpleNamespace(wait=lambda: code)

    monkeypatch.setattr("cifar_lit.cli.several.started", ended)
    answer = run_command(*CURVE, "--devices", "2")
    line = "Resume with:\n  cifar-lit train --recipe small.yaml --devices 2 --learning-curve\n"
    assert answer.code == (code if code > 0 else 128 - code)
    assert answer.err.endswith(line) == (code != 1)


def test_a_stopped_curve_names_the_command_that_continues_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("cifar_lit.cli.several.read_run", stop)
    (PARENT / "small-1").mkdir(parents=True)
    (PARENT / "small-1/config.yaml").touch()
    answer = run_command(*CURVE)
    assert answer.code == 130 and answer.err.endswith(
        "Resume with:\n  cifar-lit train --recipe small.yaml --learning-curve\n"
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("fit", "--learning-curve"), "--learning-curve trains and tests: use it with `train`"),
        (("train", "--learning-curve", "--folds", "5"), "leave one of them out"),
        (("train", "--learning-curve", "--resume"), "continues an unfinished curve by itself: leave --resume out"),
        (("train", "--learning-curve", "--nodes", "2"), "--learning-curve trains on one machine: leave --nodes out"),
        (("train", "--learning-curve", "--data.split.share", "0.5"), "sets data.split.share: leave it out"),
        (("train", "--learning-curve=4"), "learning-curve"),
        (("train", "--learning-curve", "--lr", "-1"), "lr"),
        (("train", "--learning-curve", "--data.count", "10", "--data.val_size", "20"), "data.val_size 20 must leave"),
        (("train", "--data.split.share", "0"), "above 0 and at most 1, not 0"),
        (("train", "--data.split.share", "half"), "data.split.share"),
    ],
)
def test_wrong_flags_are_refused_and_leave_no_folder(words: tuple[str, ...], line: str) -> None:
    answer = run_command(*words, *SMALL)
    assert_refused(answer._replace(out=answer.out.removeprefix("25% of the training images\n")), 2, line)
    assert not list(Path().glob("lightning_logs/*"))


def test_torchrun_is_refused() -> None:
    torchrun = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "1"}
    assert_refused(run_command(*CURVE, **torchrun), 2, "use --devices N without torchrun or srun")
