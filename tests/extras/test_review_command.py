"""`cifar-lit review`: the data it takes, the table it writes, the training that takes the table, and wrong inputs."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from contract.command_line import SMALL, assert_refused, config_of, draw_folder, rows_of, run_command
from inference.small_nets import write_net
from PIL import Image

from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.splits import Split
from cifar_lit.extras.label import review
from cifar_lit.extras.label.journal import Decision, Journal
from cifar_lit.extras.label.queue import Queue
from cifar_lit.extras.label.table import current_labels
from cifar_lit.inference.load import load

CLASSES = ["cat", "dog", "owl"]


@pytest.fixture(autouse=True)
def in_working_folder(working_folder: Path) -> None:
    """Run each test in its own working folder."""


def write_run(folder: str, **data: object) -> Path:
    """Write a run with random weights on images of 16 × 16 pixels and three classes."""
    run = write_net(Path(folder), "lenet", side=16, classes=CLASSES)
    settings = {"dataset": "folder", "image_size": 16, "cache_dir": "cache", **data}
    (run / "config.yaml").write_text(yaml.safe_dump({"data": settings}))
    return run


def decide(run: Path, *decisions: tuple[object, str, str | None], new: bool = False) -> None:
    journal = Journal(run / "review.jsonl", CLASSES)
    for image, action, label in decisions:
        journal.decide(Decision(str(image), action, label, "2026-11-24", new))
    journal.close()


def exported(run: Path) -> list[dict[str, str]]:
    answer = run_command("review", run, "--export")
    assert answer.code == 0, answer.err
    return rows_of(run / "labels-reviewed.csv")


def reviewed(run: Path, *words: object, **changes: object) -> ImageData:
    """Return the data of a training with the reviewed labels."""
    return ImageData(**{**config_of(run)["data"], "root": str(run / "labels-reviewed.csv"), **changes})


def queue_of(run: Path, *words: str) -> Queue:
    settings = review._settings([str(run), *words])
    source = Path(settings.run) if (run / "config.yaml").is_file() else review._first_fold(run, False)
    data = ImageData(**config_of(source)["data"])
    return review._queue(settings, run, load(source), data, current_labels(data))


@pytest.mark.parametrize("layout", ["parts", "classes", "table", "no test"])
def test_a_training_takes_the_table_with_the_split_of_the_run(layout: str) -> None:
    parts = {"parts": ("train/", "val/", "test/"), "no test": ("train/", "val/")}.get(layout, ("",))
    draw_folder(Path("animals"), {f"{part}{name}": 8 for part in parts for name in CLASSES})
    before = sorted(path.read_bytes() for path in Path("animals").rglob("*.png"))
    root = "animals"
    if layout == "table":
        lines = [f"{path.relative_to('animals')},{path.parent.name}" for path in Path("animals").rglob("*.png")]
        Path("animals/labels.csv").write_text("\n".join(["path,label", *lines]))
        root = "animals/labels.csv"
    run = write_run("runs/folder-1", root=root, val_size=6)
    plain = ImageData(**config_of(run)["data"])
    names, (train, val) = plain.train_images.names, plain.split
    assert names is not None
    changed, kept, dropped, skipped = (Path("animals", names[row]).absolute() for row in train[[0, 1, 2, 3]])
    changed_val = Path("animals", names[val[0]]).absolute()
    decide(run, (changed, "relabel", "owl"), (kept, "keep", "cat"), (dropped, "drop", None), (skipped, "skip", None))
    decide(run, (changed_val, "relabel", "owl"))
    rows = {row["path"]: row for row in exported(run)}
    count = len({*names, *(plain.test_images.names or ())})
    assert len(rows) == count - 1 and str(dropped) not in rows
    assert [rows[str(path)]["reviewed"] for path in (changed, kept, skipped)] == ["2026-11-24", "2026-11-24", ""]
    assert (rows[str(changed)]["label"], rows[str(changed)]["original_label"]) == ("owl", "cat")

    again = reviewed(run)
    shown = again.train_images.names
    assert shown is not None
    for part, rows_before, rows_after in zip(("train", "val"), plain.split, again.split, strict=True):
        paths = {str(Path("animals", names[row]).absolute()) for row in rows_before} - {str(dropped)}
        assert {shown[row] for row in rows_after} == paths, part
    tests = {str(Path("animals", name).absolute()) for name in plain.test_images.names or ()}
    assert {*(again.test_images.names or ())} == tests
    labels = dict(zip(shown, again.train_images.labels.tolist(), strict=True))
    assert labels[str(changed)] == labels[str(changed_val)] == 2
    assert sorted(path.read_bytes() for path in Path("animals").rglob("*.png")) == before


def test_a_cross_validation_is_reviewed_by_its_out_of_fold_predictions() -> None:
    draw_folder(Path("animals"), {"cat": 6, "dog": 6, "owl": 6})
    lines = [f"{name}/{number}.png,{name},{number // 2}" for name in CLASSES for number in range(6)]
    Path("animals/labels.csv").write_text("\n".join(["path,label,herd", *lines]))
    run = write_run("runs/small-1", root="animals/labels.csv", split={"group": "herd", "folds": 2})
    folds = Path("runs/small-folds-1")
    folds.mkdir()
    (folds / "folds.json").write_text(json.dumps({"folds": ["elsewhere/small-1", "elsewhere/small-2"]}))
    probabilities = np.full((18, 3), 0.05, np.float32)
    probabilities[range(18), np.arange(18) // 6] = 0.9
    probabilities[7] = [0.95, 0.02, 0.03]  # the label is dog
    np.save(folds / "probabilities.npy", probabilities)
    queue = queue_of(folds, "--limit", "5")
    assert queue.keys[0] == str(Path("animals/dog/1.png").absolute()) and len(queue.keys) == 5
    assert queue.summaries[0][:3] == ("1.png", "dog", "cat")
    decide(folds, (queue.keys[0], "relabel", "cat"))
    rows = exported(folds)
    assert len(rows) == 18 and "split" not in rows[0]
    groups = [row["group"] for row in rows]
    assert groups[0] == groups[1] == groups[6] != groups[2] and len(set(groups)) == 3
    answer = run_command("review", folds, "--export")
    assert answer.lines[-1] == (
        f"train with them: cifar-lit train --config {run}/config.yaml --data-dir {folds}/labels-reviewed.csv "
        "--data.split.folds 0 --data.split.group null"
    )
    with contextlib.chdir(folds):
        answer = run_command("review", ".", "--export", "--data-dir", Path("../../animals/labels.csv"))
    assert answer.code == 0, answer.err
    data = reviewed(run, root=str(folds / "labels-reviewed.csv"), split=Split(folds=2))
    assert data.train_images.labels.bincount().tolist() == [7, 5, 6]
    np.save(folds / "probabilities.npy", probabilities[1:])
    answer = run_command("review", folds, "--port", "0")
    assert answer.code == 1 and "probabilities.npy does not hold 18 × 3 numbers" in answer.error_lines[-1]


def test_images_of_a_pool_or_a_table_are_labelled_and_trained_on(capsys: pytest.CaptureFixture[str]) -> None:
    draw_folder(Path("animals"), {"cat": 6, "dog": 6, "owl": 6})
    draw_folder(Path("pool"), {"new": 3})
    for odd in ("a;=1.png", "b\nc.png", "d\u202e.png"):
        shutil.copy("pool/new/0.png", f"pool/{odd}")
    Path("pool/new/1.png").write_bytes(b"damaged")
    Path("next.csv").write_text("path,label\npool/new/2.png,\npool/gone.png,cat\npool/new/0.png,dog\n")
    run = write_run("runs/folder-1", root="animals", val_size=0)
    first, last = (str(Path(f"pool/new/{number}.png").absolute()) for number in (0, 2))
    assert queue_of(run, "--pool", "pool").keys == [first, last]
    assert "left out 3 files with names that a table cannot hold, such as " in capsys.readouterr().err
    queue = queue_of(run, "--pool", "next.csv")
    assert (queue.keys, queue.labels) == ([last, first], [None, None])
    decide(run, (first, "relabel", "owl"), (last, "drop", None), new=True)
    rows = exported(run)
    assert rows[-1] == {"path": first, "label": "owl", "original_label": "", "reviewed": "2026-11-24", "split": "train"}
    data = reviewed(run)
    assert first in (data.train_images.names or ()) and len(data.train_images) == 15 + 1


def test_report_and_review_have_the_order_of_the_list_with_all_images_on_one_scale() -> None:
    draw_folder(Path("animals"), {f"{part}/{name}": 4 for part in ("train", "val", "test") for name in CLASSES})
    run = write_run("runs/finetune-1", root="animals")
    names = ImageData(**config_of(run)["data"]).train_images.names or ()
    unseen = np.full((24, 3), 0.1, np.float32)
    unseen[range(24), [CLASSES.index(Path(name).parent.name) for name in names]] = np.linspace(0.5, 0.9, 24)
    for name, probabilities in (
        ("val/dog/1.png", [0.8, 0.1, 0.1]),
        ("train/cat/2.png", [0.01, 0.01, 0.98]),  # more suspicious, although the net was trained on it
        ("val/owl/0.png", [0.1, 0.6, 0.3]),
    ):
        unseen[names.index(name)] = probabilities
    np.save(run / "out_of_fold.npy", unseen)
    answer = run_command("report", run)
    assert answer.code == 0, answer.err
    rows = rows_of(run / "label_errors.csv")
    order = [names[int(row["index"])] for row in rows]
    assert order == [row["path"] for row in rows] and sorted(order) == sorted(names)
    assert order[:3] == ["train/cat/2.png", "val/dog/1.png", "val/owl/0.png"]
    assert [row["part"] for row in rows] == [path.partition("/")[0] for path in order]
    assert [row["suspected"] for row in rows] == ["yes"] * 3 + ["no"] * 21
    scores = [float(row["score"]) for row in rows]
    assert scores == sorted(scores) == pytest.approx([number / 24 for number in range(24)], abs=1e-6)
    captions = re.findall(r"((?:train|val)/[a-z]+/\d\.png(?: · held out)?)</", (run / "report.html").read_text())
    assert captions[:3] == ["train/cat/2.png", "val/dog/1.png · held out", "val/owl/0.png · held out"]
    (run / "label_errors.csv").unlink()
    assert queue_of(run).keys == [str(Path("animals", name).absolute()) for name in order]
    assert rows_of(run / "label_errors.csv") == rows


def test_a_list_that_cannot_be_written_costs_no_report_and_a_link_is_not_followed() -> None:
    draw_folder(Path("animals"), {f"{part}/{name}": 2 for part in ("train", "test") for name in CLASSES})
    run = write_run("runs/folder-1", root="animals")
    (run / "label_errors.csv").mkdir()
    assert run_command("report", run).code == 0 and (run / "report.html").is_file()
    (run / "label_errors.csv").rmdir()
    Path("victim.txt").write_text("not to be changed")
    (run / "label_errors.csv").symlink_to(Path("victim.txt").absolute())
    assert run_command("report", run).code == 0
    assert Path("victim.txt").read_text() == "not to be changed" and len(rows_of(run / "label_errors.csv")) == 6


def test_labels_of_a_built_in_set_are_reviewed_twice(run_dir: Path) -> None:
    run = Path(shutil.copytree(run_dir, "runs/small-1"))
    plain = ImageData(**config_of(run)["data"])
    Image.new("RGB", (16, 16)).save("black.png")
    black = str(Path("black.png").absolute())
    first, second = (int(row) for row in plain.split[0][:2])
    journal = Journal(run / "review.jsonl", plain.classes)
    journal.decide(Decision(str(first), "relabel", "star", "2026-11-24", False))
    journal.decide(Decision(str(second), "drop", None, "2026-11-24", False))
    journal.decide(Decision(black, "keep", "circle", "2026-11-24", True))
    assert len(exported(run)) == 200
    again = run_command("train", *SMALL, "--epochs", "1", "--data.labels", run / "labels-reviewed.csv")
    assert again.code == 0, again.err
    data = ImageData(**config_of(Path("lightning_logs/small-1"))["data"])
    assert [len(rows) for rows in data.split] == [160, 40]
    assert torch.equal(data.train_images.images[data.split[1]], plain.train_images.images[plain.split[1]])
    rows = exported(Path("lightning_logs/small-1"))
    assert {row["image"] for row in rows} == {*map(str, range(200)), black} - {str(second)}
    changed = next(row for row in rows if row["image"] == str(first))
    assert (changed["label"], changed["original_label"]) == ("star", "star")


# ---- wrong inputs


def test_invalid_inputs_get_one_line(run_dir: Path) -> None:
    run = Path(shutil.copytree(run_dir, "own-1"))
    bare = Path("bare-1")
    bare.mkdir()
    shutil.copy(run / "model.safetensors", bare)
    Path("label.csv").write_text("label\ncat\n")
    Path("missing.csv").write_text("path\na.png\n")
    Path("empty").mkdir()
    for words, code, text in (
        (["bare-1"], 2, "bare-1 has no config.yaml that names the data: add --dataset"),
        (["own-1", "--limit", "-1"], 2, "--limit must be 0 or more, not -1"),
        (["own-1", "--pool", "gone", "--port", "0"], 2, "--pool gone is neither a folder nor a table"),
        (["own-1", "--pool", "empty", "--port", "0"], 2, "there are no readable images in empty"),
        (["own-1", "--pool", "label.csv", "--port", "0"], 2, "label.csv has no column for the path"),
        (["own-1", "--prot", "1"], 2, "there is no flag --prot. Did you mean --port?"),
    ):
        assert_refused(run_command("review", *words), code, text)
    answer = run_command("review", "own-1", "--pool", "missing.csv", "--port", "0")
    assert answer.code == 2 and "1 of 1 images cannot be read" in answer.error_lines[0]
    (run / "review.jsonl").write_text("{}\n")
    assert_refused(run_command("review", "own-1"), 1, "review.jsonl, line 1 is not a decision about these classes")
    (run / "review.jsonl").unlink()
    (run / "review.jsonl").symlink_to("/etc/hostname")
    assert_refused(run_command("review", "own-1"), 1, "own-1/review.jsonl is a symlink pointing outside")
    (run / "folds.json").write_text('{"folds": []}')
    assert_refused(run_command("review", "own-1"), 1, "folds.json is damaged: repeat the cross-validation")
    (run / "folds.json").write_text('{"folds": ["../../elsewhere-1"]}')
    assert_refused(run_command("review", "own-1"), 1, "elsewhere-1, a run of this cross-validation, is missing")


def test_decisions_about_images_that_were_moved_are_counted() -> None:
    draw_folder(Path("animals"), {"cat": 6, "dog": 6, "owl": 6})
    run = write_run("runs/folder-1", root="animals")
    decide(run, (image := Path("animals/cat/0.png").absolute(), "drop", None))
    assert "effect" not in run_command("review", run, "--export").err
    Path("animals").rename("pets")
    answer = run_command("review", run, "--export", "--data-dir", "pets")
    expected = f"1 decision without effect: this data set has no {image}"
    assert (answer.code, answer.error_lines) == (0, [expected])


def test_photos_added_later_join_the_table_and_move_no_image_to_another_side() -> None:
    draw_folder(Path("animals"), {"cat": 20, "dog": 20, "owl": 20})
    run = write_run("runs/folder-1", root="animals", val_size=12)
    before = {row["path"]: row["split"] for row in exported(run)}
    (owl,) = (name for name in before if name.endswith("owl/0.png"))
    decide(run, (owl, "relabel", "dog"))
    draw_folder(Path("animals/cat"), {"new": 9})
    data = ImageData(**config_of(run)["data"])
    new_val = {str(Path("animals", (data.train_images.names or ())[row]).absolute()) for row in data.split[1]}
    assert any(before.get(name, "val") != "val" for name in new_val)  # a new training on the folder draws anew
    answer = run_command("review", run, "--export")
    assert answer.error_lines[-1] == f"9 images added to {run}/labels-reviewed.csv, which keeps its split"
    rows = {row["path"]: row for row in rows_of(run / "labels-reviewed.csv")}
    assert len(rows) == 69 and rows[owl]["label"] == "dog"
    assert {name: rows[name]["split"] for name in before} == before
    assert not run_command("review", run, "--export").err
    data = reviewed(run)
    names = [[(data.train_images.names or ())[row] for row in rows] for rows in data.split]
    assert {name: part for part, names in zip(("train", "val"), names, strict=True) for name in names} == {
        name: row["split"] for name, row in rows.items() if row["split"] != "test"
    }


def test_a_run_of_others_may_not_name_a_table_of_labels_elsewhere() -> None:
    run = write_run("runs/small-1", dataset="shapes", num_classes=3, labels="/elsewhere/labels.csv")
    folds = Path("runs/small-folds-1")
    folds.mkdir()
    (folds / "folds.json").write_text(json.dumps({"folds": [str(run)]}))
    for folder in (run, folds):
        answer = run_command("review", folder)
        assert_refused(answer, 2, "a configuration file sets data.labels to '/elsewhere/labels.csv'", "--trust")


def test_a_run_that_cannot_be_written_is_refused(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(review.os, "access", lambda path, mode: False)  # tests may run as root
    assert_refused(run_command("review", run_dir, "--export"), 1, "cannot be written", "review a copy of it")
