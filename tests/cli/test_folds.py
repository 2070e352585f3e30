"""`train --folds`: every image is tested on once, and what the nets say together."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from contract.command_line import (
    OWN_IMAGES,
    SMALL,
    assert_refused,
    config_of,
    draw_folder,
    metrics_of,
    rows_of,
    run_command,
)

from cifar_lit.data.datamodule import ImageData
from cifar_lit.runs.model_file import load_model_file
from cifar_lit.runs.run_data import RunData


def test_every_image_of_a_folder_is_tested_on_once_by_a_net_that_has_not_seen_it() -> None:
    draw_folder(Path("animals"), {"cat": 12, "dog": 12, "owl": 9})
    Path("animals/cat/0.png").rename("animals/dog/wrong.png")
    line = (*SMALL, *OWN_IMAGES, "--data-dir", "animals", "--data.val_size", "0", "--epochs", "40", "--folds", "3")
    answer = run_command(*line)
    assert answer.code == 0, answer.err
    runs = [Path(f"lightning_logs/small-{number}") for number in (1, 2, 3)]
    assert [config_of(run)["data"]["fold"] for run in runs] == [0, 1, 2]
    assert sum(metrics_of(run)["test"]["images"] for run in runs) == 33

    folder = Path("lightning_logs/small-folds-1")
    rows, told = rows_of(folder / "predictions.csv"), json.loads((folder / "folds.json").read_text())
    assert [int(row["index"]) for row in rows] == list(range(33))
    data = ImageData("folder", root="animals", folds=3)
    assert [row["label"] for row in rows] == [data.classes[label] for label in data.train_images.labels]
    right = sum(row["label"] == row["predicted"] for row in rows)
    assert told["test"]["accuracy"] == pytest.approx(right / 33) and told["test"]["images"] == 33
    accuracies = [metrics_of(run)["test"]["accuracy"] for run in runs]
    assert told["accuracy"]["mean"] == pytest.approx(np.mean(accuracies))
    assert told["accuracy"]["std"] == pytest.approx(np.std(accuracies, ddof=1))
    assert f"accuracy over all folds {right / 33:.4f} · 33 images" in answer.lines
    assert answer.lines[-1] == "results lightning_logs/small-folds-1"

    sample = RunData(
        runs[0] / "model.safetensors", load_model_file(runs[0]).card
    )  # what an exported file is checked on
    assert torch.equal(sample.load(train=False, count=0).labels, data.train_images.labels[data.parts.fold_rows])
    assert sample.load(train=True, count=0).what == "22 training images of folder animals"

    suspects = rows_of(folder / "label_errors.csv")
    assert suspects[0]["path"] == "dog/wrong.png" and suspects[0]["suggested"] == "cat"
    assert len(suspects) == told["test"]["suspected_labels"] == 33 - right


def test_the_folder_of_runs_is_that_of_a_configuration_file_for_all_that_belongs_to_it() -> None:
    Path("place.yaml").write_text("logs: experiments\n")
    line = (*SMALL, "--config", "place.yaml", "--epochs", "1")
    assert run_command(*line, "--folds", "2").code == 0
    assert sorted(path.name for path in Path("experiments").iterdir()) == ["small-1", "small-2", "small-folds-1"]
    assert not Path("lightning_logs").exists()
    answer = run_command("train", *line, "--resume")
    assert answer.code == 2 and "is finished" in answer.err


def test_folds_are_whole_groups_and_leave_a_test_set_alone_that_there_is() -> None:
    draw_folder(Path("animals"), {f"{part}/{name}": 10 for part in ("train", "test") for name in ("cat", "dog")})
    lines = [f"train/{name}/{number}.png,{name},{number // 2}" for name in ("cat", "dog") for number in range(10)]
    Path("animals/labels.csv").write_text("\n".join(["path,label,group", *lines]))
    for root, count in (("animals", 20), ("animals/labels.csv", 20)):
        parts = [ImageData("folder", root=root, folds=4, fold=fold, val_size=4) for fold in range(4)]
        assert sorted(row for data in parts for row in data.parts.fold_rows.tolist()) == list(range(count))
        for data in parts:
            train, val = data.split
            assert sorted([*train.tolist(), *val.tolist(), *data.parts.fold_rows.tolist()]) == list(range(count))
            assert torch.equal(data.test_images.images, data.train_images.images[data.parts.fold_rows])
            if (groups := data.train_images.groups) is not None:
                sides = [set(groups[rows].tolist()) for rows in (torch.cat((train, val)), data.parts.fold_rows)]
                assert sides[0].isdisjoint(sides[1])
    assert ImageData("folder", root="animals/labels.csv").train_images.groups is not None


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("train", "--folds", "one"), "--folds must be a number of at least 2, such as 5, not 'one'"),
        (("fit", "--folds", "5"), "--folds trains and tests: use it with `train`"),
        (("train", "--folds", "5", "--resume"), "--folds starts new trainings"),
        (("train", "--folds", "5", "--devices", "2"), "--folds trains on one device, not on --devices 2"),
        (("train", "--data.folds", "5", "--data.fold", "5"), "data.fold 5 of data.folds 5 is invalid"),
    ],
)
def test_what_no_cross_validation_can_be_made_of_is_answered_in_one_line(words: tuple[str, ...], line: str) -> None:
    assert_refused(run_command(*words, *SMALL), 2, line)
